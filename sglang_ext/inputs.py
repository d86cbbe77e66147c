"""What a user typed, checked before anything starts; a mistake ends a command with exit code 2."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup


class InputError(ValueError):
    """An option, argument or file that cannot be used. Form: field, expected, found, remedy."""

    def __init__(self, field: str, *, expected: str, found: object, remedy: str) -> None:
        super().__init__(f"{field}: expected {expected}, found {found}. {remedy}")
        self.field = field


class Commands(TyperGroup):
    """Commands that say what was wrong with their input in one line, and end with 2.

    So do exceptions that nobody foresaw: 1 is kept for what a command found out.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        except (typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # click's own
                raise
            if sys.flags.dev_mode:
                traceback.print_exc()
            what = " ".join(str(error).split())[:400]
            typer.echo(
                f"error: {type(error).__name__}: {what}. Unforeseen: PYTHONDEVMODE=1 shows where.",
                err=True,
            )
            raise typer.Exit(2) from error


def is_given(ctx: typer.Context, option: str) -> bool:
    """Whether the user typed the option, rather than leaving it to its default."""
    for parameter in ctx.command.params:
        if option in parameter.opts:
            source = ctx.get_parameter_source(str(parameter.name))
            return source is not None and source.name == "COMMANDLINE"
    raise KeyError(option)


def refuse_without_effect(ctx: typer.Context, beside: str, *options: str) -> None:
    """An option that would be passed over is a mistake, whatever its value.

    beside: what makes the options useless, as the message says it

    Raises:
        InputError: the first of them that was typed.
    """
    for option in options:
        if is_given(ctx, option):
            raise InputError(
                option, expected=f"none {beside}, where it has no effect", found="one",
                remedy="Leave it out.",
            )  # fmt: skip


def options_but(ctx: typer.Context, *kept: str) -> list[str]:
    """All options of the command but some, by their first names."""
    names = [parameter.opts[0] for parameter in ctx.command.params if parameter.opts[0][:1] == "-"]
    return [name for name in names if name not in (*kept, "--help")]


def output_file(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Find out before the work, not after it, that its result cannot be written.

    endings: the formats there are; any when empty

    Raises:
        InputError: a folder, a file in a folder that is not there, no permission, another ending.
    """
    if path is None:
        return
    folder = path.absolute().parent
    try:
        # Path("") is ".", a folder too.
        is_folder = path.is_dir()
    except OSError as error:
        raise InputError(
            option, expected="a file's name", found=error, remedy="Name another."
        ) from error
    if is_folder:
        raise InputError(option, expected="a file", found=f"the folder {path}", remedy="Name one.")
    if not folder.is_dir():
        raise InputError(
            option, expected="a file in a folder that is there", found=path, remedy="Make it."
        )
    if endings and path.suffix.lower() not in endings:
        raise InputError(
            option, expected=f"a name that ends in {_either(endings)}", found=path, remedy="Rename."
        )
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InputError(
            option, expected="a file that can be written", found=error, remedy="Name another."
        ) from error
    if not was_there:
        path.unlink()


PLOTS = (".png", ".svg", ".pdf")


def plot_file(option: str, path: Path | None) -> None:
    """`output_file` for a plot. Raises InputError also where matplotlib is missing."""
    output_file(option, path, PLOTS)
    if path is None:
        return
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise InputError(
            option, expected="matplotlib", found="none", remedy="pip install 'sglang-ext[plots]'."
        ) from error


def keep_apart(files: Mapping[str, Path | None]) -> None:
    """No file of a command is written over another of its own, read or written.

    files: option -> file

    Raises:
        InputError: two options name one file.
    """
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if other := seen.get(path.resolve()):
            raise InputError(
                option, expected=f"another file than {other}", found=path, remedy="Rename."
            )
        seen[path.resolve()] = option


def output_folder(option: str, path: Path) -> Path:
    """The folder, made where it is not there. Raises InputError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            option, expected="a folder that is there or can be made", found=error,
            remedy="Name another.",
        ) from error  # fmt: skip
    return path


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def positive(value: float | None) -> float | None:
    """A typer callback: a finite number above 0, or nothing (`min` of typer lets nan pass)."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"expected a finite number above 0, found {value}")
    return value


def not_negative(value: float | None) -> float | None:
    """A typer callback: a finite number of at least 0, or nothing."""
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"expected a finite number of at least 0, found {value}")
    return value
