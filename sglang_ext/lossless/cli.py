"""`sglang-ext lossless`: does speculation change what a server answers?"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sglang_ext.inputs import (
    InputError,
    keep_apart,
    not_negative,
    output_file,
    refuse_without_effect,
)
from sglang_ext.lossless.errors import CannotTest, RefusedRequest

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_ext.lossless.flow import Opened
    from sglang_ext.lossless.types import Prompt


def lossless(
    ctx: typer.Context,
    launch: Annotated[
        list[str] | None, typer.Argument(metavar="[-- LAUNCH ARGUMENTS]", show_default=False)
    ] = None,
    base: Annotated[str | None, typer.Option(help="Server without speculation.")] = None,
    spec: Annotated[str | None, typer.Option(help="The same model with speculation.")] = None,
    itself: Annotated[
        str | None, typer.Option("--self", help="One sglang-ext server, both ways.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
    api: Annotated[
        str, typer.Option(help="auto: SGLang's and vLLM's own where found; openai: /v1 alone.")
    ] = "auto",
    together: Annotated[
        bool, typer.Option(help="Launched servers are up at once; else they take turns.")
    ] = False,
    first_port: Annotated[
        int, typer.Option(min=1024, max=65000, help="For launched ones.")
    ] = 31500,
    only: Annotated[
        str, typer.Option(help="Groups of checks, of greedy,sampled,echo,parameters.")
    ] = "greedy,sampled,echo,parameters",
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL: prompt, input_ids, messages or turns a line.")
    ] = None,
    sets: Annotated[str | None, typer.Option(help="Built-in sets, e.g. code,math.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use so many prompts.")] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of a greedy answer.")] = 64,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16",
    samples: Annotated[int, typer.Option(min=50, help="Draws of a prompt on each side.")] = 400,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of a draw that are compared.")] = 6,
    sampled_prompts: Annotated[int, typer.Option(min=1, help="Prompts that are sampled.")] = 6,
    bound: Annotated[
        float | None,
        typer.Option(callback=not_negative, help="Nats that count as rounding; else measured."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16, where the server does not tell.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the identifiers to copy.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all evidence.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report, .html or .md.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, result only.")] = False,
) -> None:
    """Check that speculative decoding changes nothing: greedy text, sampled laws, parameters.

    Three ways to name the servers: --base URL --spec URL (any OpenAI-compatible servers), --self
    URL (one server of ours, drafts turned off per request), or `-- LAUNCH ARGUMENTS` of a
    speculative SGLang server, which is then started with and without its speculative flags.

    Exit code: 0 lossless within what was tested, 1 an unexplained difference, 2 could not test.
    """
    from rich.console import Console

    from sglang_ext.lossless import suite
    from sglang_ext.lossless.endpoint import APIS
    from sglang_ext.lossless.report import as_json, print_result, write_report
    from sglang_ext.lossless.sampled import SampledPlan

    console = Console(stderr=True, quiet=quiet)
    try:
        plan = suite.Plan(
            groups=names("--only", only, suite.GROUPS),
            tokens=tokens,
            concurrency=numbers("--concurrency", concurrency),
            bound=bound,
            dtype=one_name("--dtype", dtype, ("auto", "float32", "bfloat16", "float16")),
            sampled=SampledPlan(samples=samples, depth=depth),
            sampled_prompts=sampled_prompts,
            seed=seed,
        )
        _has_effect(ctx, plan.groups, bool(launch), itself is not None, prompts is not None)
        asked = _prompts(prompts, sets)[:limit]
        output_file("--json", json_file)
        output_file("--report", report, (".html", ".md"))
        keep_apart({"--prompts": prompts, "--json": json_file, "--report": report})
        with_api = one_name("--api", api, APIS)
        servers = _servers(
            launch or [], base, spec, itself, key, with_api, together, first_port, console
        )
        with ended_by_sigterm(), servers as opened, _Progress(console) as progress:
            result = suite.run(opened, asked, plan, progress.stage, progress.counted)
        print_result(result, Console(width=None if Console().is_terminal else 140))
        if json_file is not None:
            json_file.write_text(as_json(result) + "\n", encoding="utf-8")
        if report is not None:
            write_report(result, report)
    except (CannotTest, RefusedRequest, InputError) as error:
        _give_up(str(error))
    except KeyboardInterrupt:
        _give_up("ended by the user; the servers that were started have been stopped")
    except Exception as error:
        # Python would end with 1, which says that a difference was found.
        _give_up(" ".join(f"unexpected {type(error).__name__}: {error}".split()))
    raise typer.Exit(result.exit_code)


def _give_up(message: str) -> NoReturn:
    typer.echo(f"could not test: {message}", err=True)
    raise typer.Exit(2)


def _prompts(file: Path | None, sets: str | None) -> list[Prompt]:
    from sglang_ext.lossless.prompts import KINDS, builtin, read_prompts

    if file is not None:
        return read_prompts(file)
    return builtin(KINDS if sets is None else names("--sets", sets, KINDS))


def _servers(
    launch: list[str],
    base: str | None,
    spec: str | None,
    itself: str | None,
    key: str | None,
    api: str,
    together: bool,
    first_port: int,
    console: Console,
) -> AbstractContextManager[Opened]:
    from sglang_ext.lossless import connected
    from sglang_ext.lossless.servers import Pair

    ways = [base is not None or spec is not None, itself is not None, bool(launch)]
    if sum(ways) != 1 or (ways[0] and (base is None or spec is None)):
        raise CannotTest(
            "servers",
            expected="--base URL --spec URL, or --self URL, or -- LAUNCH ARGUMENTS",
            found="none of them" if not any(ways) else "a mixture or a part",
            remedy="Name the servers in one of these ways.",
        )
    if launch:
        return Pair(
            launch, together=together, first_port=first_port, report=console.print, key=key, api=api
        )
    if itself is not None:
        return nullcontext(connected.itself(itself, key))
    assert base is not None
    assert spec is not None
    return nullcontext(connected.both(base, spec, key, api))


def _has_effect(
    ctx: typer.Context, groups: tuple[str, ...], launch: bool, itself: bool, prompts: bool
) -> None:
    """Raises InputError for an option that the others given make useless."""
    if not launch:
        refuse_without_effect(ctx, "without -- LAUNCH ARGUMENTS", "--together", "--first-port")
    if itself:
        refuse_without_effect(ctx, "beside --self, which needs SGLang's own", "--api")
    if prompts:
        refuse_without_effect(ctx, "beside --prompts", "--sets")
    if "sampled" not in groups:
        useless = ("--samples", "--depth", "--sampled-prompts")
        refuse_without_effect(ctx, "without the sampled checks (--only)", *useless)
    if "echo" not in groups:
        refuse_without_effect(ctx, "without the echo checks (--only)", "--seed")
    if groups == ("sampled",):
        refuse_without_effect(ctx, "with the sampled checks alone (--only)", "--bound")


def names(option: str, given: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in given.split(",") if part.strip())
    if not names or any(name not in known for name in names):
        raise CannotTest(
            option, expected=f"some of {', '.join(known)}", found=given, remedy="Correct it."
        )
    return names


def one_name(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise CannotTest(
            option, expected=f"one of {', '.join(known)}", found=given, remedy="Name one."
        )
    return given


def numbers(option: str, given: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > 256:
        raise CannotTest(
            option, expected="numbers from 1 to 256", found=given, remedy="For example 1,4,16."
        )
    return numbers


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that started servers are stopped."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Progress:
    """A line that says what is being asked, a bar where the number of requests is known."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True)
        self._task = self._bars.add_task("", total=None)

    def stage(self, side: str, name: str) -> None:
        self._bars.update(self._task, description=f"{side}: {name}", total=None)

    def counted(self, total: int) -> Callable[[], None]:
        self._bars.update(self._task, total=total, completed=0)
        return lambda: self._bars.advance(self._task)

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
