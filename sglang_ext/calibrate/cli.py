"""`sglang-ext calibrate`: the two tables of DSPARK's scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sglang_ext.inputs import (
    InputError,
    keep_apart,
    output_file,
    plot_file,
    positive,
    refuse_without_effect,
)

app = typer.Typer(
    help="Measure this machine (sps) and fit a draft's confidence (sts) for DSPARK's scheduler.",
    no_args_is_help=True,
)


# Beyond this relative error the additive model says little; on an idle machine it is below.
BUSY = 0.3


@app.command()
def sps(
    ctx: typer.Context,
    launch: Annotated[
        list[str] | None, typer.Argument(metavar="[-- LAUNCH ARGUMENTS]", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path("sps.json"),
    grid: Annotated[
        Path | None, typer.Option(help="A speed grid that a server has cached, in place of one.")
    ] = None,
    additive: Annotated[
        bool, typer.Option("--additive", help="Two axes: requests and verify rows.")
    ] = False,
    first_port: Annotated[int, typer.Option(min=1024, max=65000)] = 31800,
    seconds: Annotated[
        float, typer.Option(callback=positive, help="How long a start may take.")
    ] = 900,
) -> None:
    """Steps per second by verify rows, for --speculative-dspark-sps-table-path.

    `-- LAUNCH ARGUMENTS` are those of the server the table is for; it is started once, measures
    itself and is stopped. Run it on the machine that will serve, while nothing else runs there.
    """
    from sglang_ext.calibrate.sps import additive_table, measure, read_grid, sps_table
    from sglang_ext.core.spec.sps import AdditiveTable, SpsTable
    from sglang_ext.lossless.errors import CannotTest

    with _refusals():
        if (grid is None) == (not launch):
            raise CannotTest(
                "source",
                expected="-- LAUNCH ARGUMENTS or --grid FILE",
                found="both" if launch else "neither",
                remedy="Give one of them.",
            )
        output_file("--out", out)
        keep_apart({"--grid": grid, "--out": out})
        if grid is not None:
            refuse_without_effect(ctx, "beside --grid", "--first-port", "--seconds")
            found = read_grid(grid)
        else:
            found = measure(
                launch or [],
                first_port=first_port,
                seconds=seconds,
                report=lambda line: typer.echo(line, err=True),
            )
        table: SpsTable | AdditiveTable = sps_table(found)
        if additive:
            table, off = additive_table(found)
            typer.echo(f"greatest error of the additive model on the grid: {100 * off:.1f} %")
            if off > BUSY:
                typer.echo("the grid does not fit: was the machine busy? Measure again.", err=True)
        table.save(out)
    _show_grid(found)
    typer.echo(f"wrote {out}: pass it as --speculative-dspark-sps-table-path")


@app.command()
def sts(
    recorded: Annotated[list[Path], typer.Argument(help="Recorded .jsonl or .pt, or folders.")],
    out: Annotated[Path, typer.Option(help="Where the temperatures go.")] = Path("sts.json"),
    name: Annotated[str, typer.Option(help="What was recorded, kept in the file.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Reliability diagram, a .png.")] = None,
) -> None:
    """Fit the confidence temperatures of a draft, for --speculative-dspark-confidence-sts-path.

    Record first: start the server with SGLANG_DSPARK_STS_COLLECT_PATH=STEM and
    SGLANG_EXT_SCHEDULER=off, send it requests, and give the files STEM.* here.
    """
    from sglang_ext.calibrate.sts import fit, read
    from sglang_ext.calibrate.sts import plot as draw

    with _refusals():
        output_file("--out", out)
        plot_file("--plot", plot)
        for path in recorded:
            keep_apart({"the recorded one": path, "--out": out, "--plot": plot})
        rounds = read(recorded)
        fitted = fit(rounds, name)
        fitted.save(out)
        if plot is not None:
            draw(rounds, fitted, plot)
    typer.echo(f"{fitted.num_samples} rounds")
    typer.echo("draft  temperature  ECE before  after")
    rows = zip(fitted.temperatures, fitted.ece_before, fitted.ece_after, strict=True)
    for k, (temperature, before, after) in enumerate(rows, start=1):
        typer.echo(f"{k:5}  {temperature:11.3f}  {before:10.4f}  {after:.4f}")
    typer.echo(f"wrote {out}: pass it as --speculative-dspark-confidence-sts-path")


def _show_grid(grid: object) -> None:
    from rich.console import Console
    from rich.table import Table

    from sglang_ext.core.spec.speed_grid import SpeedGrid

    assert isinstance(grid, SpeedGrid)
    rows = [f"verify {n} rows each, ms" for n in grid.rows]
    table = Table("requests", "draft, ms", *rows)
    for b, draft, verify in zip(
        grid.requests, grid.draft_seconds, grid.verify_seconds, strict=True
    ):
        table.add_row(str(b), f"{1e3 * draft:.2f}", *(f"{1e3 * t:.2f}" for t in verify))
    Console().print(table)


@contextmanager
def _refusals() -> Iterator[None]:
    """Print what could not be done and end with 2."""
    from sglang_ext.lossless.errors import CannotTest

    try:
        yield
    except (CannotTest, InputError) as error:
        typer.echo(f"could not calibrate: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("ended by the user; the server that was started has been stopped", err=True)
        raise typer.Exit(2) from None
