"""`sglang-ext demo`: the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="The built-in model, SmolLM2-135M-Instruct.")


@app.callback()
def main() -> None:
    """The built-in model, SmolLM2-135M-Instruct, and the drafts made for it."""


@app.command()
def prepare(
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Where to keep it. Default: $SGLANG_EXT_CACHE/demo, else ~/.cache."),
    ] = None,
) -> None:
    """Download and convert the model once, and place its drafts beside it.

    Prints one JSON object with the checkpoint directories `target`, `dspark` and `dflash`;
    progress goes to stderr. Run it again at any time: what is already there is verified and kept,
    what is missing or damaged is made again.

    Example:

        paths=$(sglang-ext demo prepare)
    """
    from sglang_ext.demo.prepare import PrepareError, paths_as_dict
    from sglang_ext.demo.prepare import prepare as run

    console = Console(stderr=True)
    try:
        with console.status("preparing the built-in model") as status:
            paths = run(cache_dir, progress=status.update)
    except PrepareError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(paths_as_dict(paths)))


@app.command(name="run")
def run_demo(
    once: Annotated[
        bool, typer.Option("--once", help="Answer, print the figures, end the server.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="To serve on. Default: a free one.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where the model is kept.")] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Further SGLang flags, after `--`.")
    ] = None,
) -> None:
    """Serve the built-in model with DSPARK, stream an answer, and show what drafting gains.

    Leaves the server up, with the commands to try next, until Ctrl-C.

    Example:

        sglang-ext demo run --once -- --dtype float32
    """
    from sglang_ext.demo.prepare import PrepareError, paths_as_dict
    from sglang_ext.demo.prepare import prepare as fetch
    from sglang_ext.demo.run import DemoError
    from sglang_ext.demo.run import run as serve

    console = Console(stderr=True)
    try:
        with console.status("preparing the built-in model") as status:
            paths = paths_as_dict(fetch(cache_dir, progress=status.update))
        serve(paths, once=once, port=port, extra=extra or [])
    except (PrepareError, DemoError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
