"""`sglang-ext tiny-model`: write a tiny checkpoint of a large architecture."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_ext.inputs import InputError
from sglang_ext.tiny_model.folder import own_folder

app = typer.Typer(no_args_is_help=True)


class Storage(StrEnum):
    """How matrices are stored."""

    NONE = "none"
    FP8 = "fp8"
    FP4 = "fp4"


class Dtype(StrEnum):
    """Element type of what is not quantised."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Out = Annotated[
    Path, typer.Option("--out", help="Folder to write; another's checkpoint in it is kept.")
]
Layers = Annotated[int, typer.Option(min=1, help="Decoder layers.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random weights.")]
Type = Annotated[Dtype, typer.Option("--dtype", help="Element type of what is not quantised.")]
Fields = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=JSON", help="Replace a field of config.json; repeatable."),
]


@app.callback()
def main() -> None:
    """Write a checkpoint of random weights with every part of a large architecture.

    It answers nonsense, quickly, on any machine: try flags, layouts and speculation with it.
    """


@app.command(name="deepseek-v4")
def deepseek_v4(
    out: Out,
    layers: Layers = 6,
    with_dspark: Annotated[
        bool | None,
        typer.Option(
            "--with-dspark/--without-dspark",
            help="The bundled DSpark draft (mtp.0 to mtp.2); there unless --with-mtp is given.",
        ),
    ] = None,
    with_mtp: Annotated[
        bool,
        typer.Option("--with-mtp", help="The MTP module (mtp.0) instead, a draft under NEXTN."),
    ] = False,
    quant: Annotated[
        Storage, typer.Option(help="fp8: matrices e4m3 with 128 x 128 scales; fp4: experts e2m1.")
    ] = Storage.NONE,
    dtype: Type = Dtype.FLOAT32,
    seed: Seed = 0,
    fields: Fields = None,
) -> None:
    """DeepSeek-V4: hyper-connections, CSA and HCA attention, hash and top-k experts."""
    import torch

    from sglang_ext.tiny_model.deepseek_v4 import tiny_config, write

    known = {**tiny_config(with_dspark=True), **tiny_config(with_mtp=True)}
    if with_dspark and with_mtp:
        raise typer.BadParameter("--with-dspark and --with-mtp: expected one of them, found both")
    drafts = not with_mtp if with_dspark is None else with_dspark
    with _mistakes():
        write(
            own_folder("--out", out),
            layers=layers,
            with_dspark=drafts,
            with_mtp=with_mtp,
            quant=quant.value,
            dtype=getattr(torch, dtype.value),
            seed=seed,
            **changes(fields, known),
        )
    algorithm = "DSPARK" if drafts else "NEXTN" if with_mtp else None
    _say(out, dtype, "" if algorithm is None else f" --speculative-algorithm {algorithm}")


@app.command(name="deepseek-v3.2")
def deepseek_v32(
    out: Out,
    layers: Layers = 4,
    quant: Annotated[Storage, typer.Option(help="fp8: matrices e4m3 with block scales.")] = (
        Storage.NONE
    ),
    dtype: Type = Dtype.FLOAT32,
    seed: Seed = 0,
    fields: Fields = None,
) -> None:
    """DeepSeek-V3.2: latent attention over the tokens that its indexer selects."""
    import torch

    from sglang_ext.tiny_model.deepseek_v32 import tiny_config, write
    from sglang_ext.tiny_model.tokenizer import save_tokenizer

    if quant is Storage.FP4:
        raise typer.BadParameter("expected none or fp8 for DeepSeek-V3.2, found fp4")
    with _mistakes():
        write(
            own_folder("--out", out),
            seed=seed,
            dtype=getattr(torch, dtype.value),
            fp8_block=(128, 128) if quant is Storage.FP8 else None,
            num_hidden_layers=layers,
            **changes(fields, tiny_config()),
        )
        save_tokenizer(out, json.loads((out / "config.json").read_text())["vocab_size"])
    _say(out, dtype, "")


# Fields that an option of their own sets.
_OWN = {"num_hidden_layers": "--layers", "torch_dtype": "--dtype"}


def changes(fields: list[str] | None, known: Iterable[str]) -> dict[str, Any]:
    """FIELD=JSON arguments as a record.

    known: the fields that there are

    Raises:
        InputError: an argument of another form, or of a field that is not there.
    """
    found = {}
    for item in fields or ():
        name, equals, value = item.partition("=")
        if name in _OWN:
            raise InputError(
                "--set", expected=f"{_OWN[name]} instead", found=item, remedy=f"Use {_OWN[name]}."
            )
        if equals and name not in known:
            close = ", ".join(get_close_matches(name, list(known))) or "see its config.json"
            raise InputError(
                "--set", expected="a field of config.json", found=item, remedy=f"Nearest: {close}."
            )
        try:
            if not (name and equals):
                raise ValueError("no '='")
            found[name] = json.loads(value)
        except ValueError as error:
            raise InputError(
                "--set", expected="FIELD=JSON", found=f"{item!r} ({error})",
                remedy="As in --set index_topk=16.",
            ) from error  # fmt: skip
    return found


@contextmanager
def _mistakes() -> Iterator[None]:
    """Values that make no model are the user's: the checkpoint's own check says which."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            "--set", expected="sizes of a model", found=error, remedy="Correct it."
        ) from error


def _say(out: Path, dtype: Dtype, speculation: str) -> None:
    typer.echo(f"wrote {out}; serve it with:")
    path = shlex.quote(str(out))
    typer.echo(
        f"  python -m sglang.launch_server --model-path {path} --dtype {dtype.value}{speculation}"
    )
