"""`sglang-ext bench`: a grid of servers and loads, correctness before speed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_ext.inputs import (
    InputError,
    keep_apart,
    not_negative,
    output_file,
    plot_file,
    refuse_without_effect,
)

if TYPE_CHECKING:
    from sglang_ext.bench_cli.grid import Dataset, Point, Setting
    from sglang_ext.bench_cli.results import Results
    from sglang_ext.bench_cli.tools import Load

Say = Callable[[str], None]


def bench(
    ctx: typer.Context,
    launch: Annotated[
        list[str] | None, typer.Argument(metavar="[-- LAUNCH ARGUMENTS]", show_default=False)
    ] = None,
    algorithms: Annotated[
        list[str] | None, typer.Option("--with", help="ALGORITHM=DRAFT; may be repeated.")
    ] = None,
    gamma: Annotated[str, typer.Option(help="Drafts per round, e.g. 3,7; empty: default.")] = "",
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="random, code, math, chat, or NAME=FILE; may be repeated."),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16",
    tool: Annotated[
        str, typer.Option(help="serving (bench_serving) or one-batch (bench_one_batch_server).")
    ] = "serving",
    input_tokens: Annotated[int, typer.Option(min=1, help="Of random prompts.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=4, help="Of every answer.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="Requests of a point.")] = 32,
    chat: Annotated[
        bool, typer.Option("--chat", help="Texts in the model's chat format (not random ids).")
    ] = False,
    temperature: Annotated[
        float, typer.Option(callback=not_negative, help="Of every request.")
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="Results; points in it are not repeated.")] = Path(
        "bench.json"
    ),
    plot: Annotated[Path | None, typer.Option(help="Curves of the results, a .png.")] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="The table as a .md, or in a page between its two marker comments."),
    ] = None,
    first_port: Annotated[int, typer.Option(min=1024, max=65000)] = 31900,
) -> None:
    """Time SGLang's own benchmark tools over algorithms, gammas, data sets and concurrencies.

    LAUNCH ARGUMENTS are those of the server without speculation; the speculative flags come from
    --with and --gamma. Without them the built-in model is measured with both of its drafts on code,
    math and chat; --markdown writes speed, ratio and acceptance length as a table.

    Before a speculative setting is timed, a short `sglang-ext lossless` run must find nothing.

    Exit code: 0 all measured, 1 a setting failed that run, 2 could not measure.
    """
    from sglang_ext.bench_cli import grid
    from sglang_ext.bench_cli.markdown import placed, table
    from sglang_ext.bench_cli.plots import plot as draw
    from sglang_ext.bench_cli.results import Results
    from sglang_ext.bench_cli.tools import TOOLS, Load
    from sglang_ext.lossless.cli import ended_by_sigterm, numbers, one_name
    from sglang_ext.lossless.errors import CannotTest, RefusedRequest

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        _check(launch or [])
        output_file("--out", out)
        plot_file("--plot", plot)
        output_file("--markdown", markdown, (".md",))
        keep_apart({"--out": out, "--plot": plot, "--markdown": markdown})
        if markdown is not None:
            placed("", markdown)
        gammas = list(numbers("--gamma", gamma)) if gamma else [None]
        load = Load(
            tool=one_name("--tool", tool, TOOLS),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prompts=prompts,
            temperature=temperature,
            # The built-in model answers questions, and its drafts have learnt from such answers.
            chat=chat or not launch,
        )
        usual = ["random"] if launch or load.tool == "one-batch" else list(grid.BUILT_IN)
        loads = grid.datasets(dataset or usual)
        if load.tool == "one-batch" and not all(one.is_random for one in loads):
            raise CannotTest(
                "--dataset", expected="random with one-batch", found=dataset, remedy="Drop it."
            )
        _has_effect(ctx, load.tool, loads, speculates=bool(algorithms) or not launch)
        if not launch:
            launch, drafts = _built_in()
            algorithms = algorithms or drafts
        chosen = grid.settings(algorithms or [], gammas)
        points = grid.points(chosen, loads, numbers("--concurrency", concurrency))
        results = Results(out, launch, load)
        base = [p for p in points if p.setting == chosen[0]]
        if results.missing(points) or results.due_again(base):
            results.require_this_machine()
        with ended_by_sigterm():
            refused = [
                setting.key
                for setting in chosen
                if not _one_setting(setting, points, results, launch, load, first_port, say)
            ]
            _time(results.due_again(base), results, launch, load, first_port, say, part="again")
        if plot is not None:
            draw(results.ratios(), plot)
        if markdown is not None:
            markdown.write_text(placed(table(results), markdown), encoding="utf-8")
        _show(results)
    except (CannotTest, RefusedRequest, InputError) as error:
        say(f"could not measure: {error}")
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        say(f"ended by the user; run it again to go on from {out}")
        raise typer.Exit(2) from None
    except Exception as error:
        # Python would end with 1, which says that a setting is not lossless.
        traceback.print_exc()
        said = " ".join(f"unexpected {type(error).__name__}: {error}".split())
        kept = f" What was measured is in {out}; run it again to go on." if out.exists() else ""
        say(f"could not measure: {said}.{kept}")
        raise typer.Exit(2) from error
    if warning := results.unsteady():
        say(f"note: {warning}")
    for name in refused:
        say(f"not timed, since it is not lossless: {name} (the reason is in {out})")
    raise typer.Exit(1 if refused else 0)


def _has_effect(ctx: typer.Context, tool: str, loads: list[Dataset], speculates: bool) -> None:
    """Raises InputError for an option that the others given make useless."""
    if tool == "one-batch":
        refuse_without_effect(ctx, "with --tool one-batch", "--prompts")
    if all(one.is_random for one in loads):
        refuse_without_effect(ctx, "on random ids alone", "--chat")
    if not any(one.is_random for one in loads):
        refuse_without_effect(ctx, "without --dataset random", "--input-tokens")
    if not speculates:
        refuse_without_effect(ctx, "without --with", "--gamma")


def _built_in() -> tuple[list[str], list[str]]:
    """Launch arguments of the built-in model, and its drafts as --with takes them."""
    from sglang_ext.demo.prepare import PrepareError, prepare
    from sglang_ext.lossless.errors import CannotTest

    try:
        paths = prepare()
    except PrepareError as error:
        raise CannotTest(
            "built-in model", expected="to be there", found=error, remedy="Or name a --model-path."
        ) from error
    launch = ["--model-path", paths.target, "--dtype", "bfloat16", "--max-running-requests", "32"]
    launch += ["--max-total-tokens", "32768"]
    return launch, [f"DSPARK={paths.dspark}", f"DFLASH={paths.dflash}"]


def _check(launch: list[str]) -> None:
    from sglang_ext.lossless.errors import CannotTest

    for part in launch:
        if part.startswith("--speculative-") or part in ("--port", "--host"):
            raise CannotTest(
                "launch arguments",
                expected="those of the server without speculation, without --port and --host",
                found=part,
                remedy="Name algorithms by --with and --gamma; ports are chosen (--first-port).",
            )


def _one_setting(
    setting: Setting,
    points: list[Point],
    results: Results,
    launch: list[str],
    load: Load,
    first_port: int,
    say: Say,
) -> bool:
    """Measure what is missing of one server; False where its gate found a difference."""
    from sglang_ext.lossless.errors import CannotTest

    todo = results.missing([p for p in points if p.setting == setting])
    if not todo:
        return True
    argv = _argv(launch, setting)
    if not results.passed(setting):
        code = _gate(setting, argv, results, load, first_port, say)
        if code == 1:
            return False
        if code == 2:
            raise CannotTest(
                f"gate of {setting.key}",
                expected="a lossless run that tested something",
                found=results.data["gates"][setting.key]["statement"],
                remedy="Run sglang-ext lossless with the same arguments to see why.",
            )
    _time(todo, results, launch, load, first_port, say)
    return True


def _argv(launch: list[str], setting: Setting) -> list[str]:
    argv = [*launch, *setting.flags]
    if not any(part.startswith("--decode-log-interval") for part in argv):
        # SGLang adds to its acceptance average whenever it logs, by default every 40 rounds.
        argv += ["--decode-log-interval", "4"]
    return argv


def _time(
    points: list[Point],
    results: Results,
    launch: list[str],
    load: Load,
    first_port: int,
    say: Say,
    part: str = "points",
) -> None:
    """Measure points of one server. part: of the results, `again` for the base's second turn."""
    from sglang_ext.bench_cli.tools import measure
    from sglang_ext.lossless.servers import LaunchedServer, free_port

    if not points:
        return
    setting, port = points[0].setting, free_port(first_port)
    turn = ", again" if part == "again" else ""
    say(f"{setting.key}{turn}: starting the server on port {port}")
    server = LaunchedServer(_argv(launch, setting), port, 1800)
    try:
        server.wait_ready()
        for number, point in enumerate(points, start=1):
            say(f"{point.key}{turn} ({number} of {len(points)})")
            results.keep_point(point, measure(server.url, point, load), part)
    finally:
        server.stop()


def _gate(
    setting: Setting, argv: list[str], results: Results, load: Load, first_port: int, say: Say
) -> int:
    """A short lossless run: greedy identity, and sampled laws where the load samples."""
    from sglang_ext.lossless import suite
    from sglang_ext.lossless.prompts import builtin
    from sglang_ext.lossless.sampled import SampledPlan
    from sglang_ext.lossless.servers import Pair

    plan = suite.Plan(
        groups=("greedy", "sampled") if load.temperature else ("greedy",),
        tokens=48,
        concurrency=(1, 8),
        noise_prompts=8,
        repeats=0,
        sampled=SampledPlan(samples=200, depth=4),
    )
    say(f"{setting.key}: correctness gate")
    chosen = builtin(("code", "math", "chat", "languages"))[::3]
    with Pair(argv, together=False, first_port=first_port, report=say) as opened:
        result = suite.run(opened, chosen, plan)
    results.keep_gate(setting, result)
    return result.exit_code


def _show(results: Results) -> None:
    from rich.console import Console
    from rich.table import Table

    first = ("server", "data", "concurrency")
    table = Table(*first, "tokens/s", "ratio", "TPOT ms", "TTFT ms", "acceptance length")
    for row in results.ratios():
        table.add_row(
            row["server"],
            row["data"],
            str(row["concurrency"]),
            _figure(row["output_tokens_per_second"]),
            _figure(row["ratio"], 2),
            _figure(row.get("median_tpot_ms")),
            _figure(row.get("median_ttft_ms")),
            _figure(row.get("acceptance_length"), 2),
        )
    Console(width=None if Console().is_terminal else 140).print(table)


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
