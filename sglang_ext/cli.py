"""The `sglang-ext` command: thin, each group lives with what it drives."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_ext import __version__
from sglang_ext.bench_cli.cli import bench
from sglang_ext.calibrate.cli import app as calibrate_app
from sglang_ext.demo.cli import app as demo_app
from sglang_ext.inputs import Commands
from sglang_ext.launcher.cli import launch
from sglang_ext.lossless.cli import lossless
from sglang_ext.planner.cli import plan
from sglang_ext.tiny_model.cli import app as tiny_model_app
from sglang_ext.training.cli import app as training_app

app = typer.Typer(
    name="sglang-ext",
    cls=Commands,
    help="For SGLang 0.5.23 on any device: exact speculative decoding, DeepSeek-V4 and V3.2, "
    "parallel layouts, and a checker that shows speculation changes nothing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(demo_app, name="demo")
app.add_typer(training_app, name="train-draft")
app.add_typer(tiny_model_app, name="tiny-model")
app.command()(launch)
app.command()(plan)
app.add_typer(calibrate_app, name="calibrate")
app.command(name="lossless")(lossless)
app.command(name="bench")(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Serve with `python -m sglang.launch_server ... --speculative-algorithm DSPARK`."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine will run: platform, patches, whose worker answers, what is missing.

    Exits with 1 when something would keep a server from starting.
    """
    from sglang_ext.doctor import examine

    report = examine()
    typer.echo(report.as_json() if as_json else report.as_text())
    raise typer.Exit(0 if report.healthy else 1)


if __name__ == "__main__":
    app()
