"""`sglang-ext plan`: rank layouts, explain, draw, check against a bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from sglang_ext.inputs import (
    is_given,
    keep_apart,
    options_but,
    output_file,
    positive,
    refuse_without_effect,
)
from sglang_ext.inputs import plot_file as check_plot
from sglang_ext.launcher import catalog
from sglang_ext.launcher.errors import ConfigError, nearest
from sglang_ext.launcher.fields import LARGEST
from sglang_ext.planner import acceptance, report
from sglang_ext.planner.numbers import DEFAULT
from sglang_ext.planner.picture import draw
from sglang_ext.planner.search import OBJECTIVES, Answer, Objective, Question, search
from sglang_ext.planner.search import concurrency_for as concurrency_of_rate
from sglang_ext.planner.shape import read_shape
from sglang_ext.planner.tables import TABLES, plot
from sglang_ext.planner.validate import validate


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A name in launch/base, or a directory with config.json.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="8xh200, 2x8xh100, cpu; or a GPU (h200) with --gpus.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(max=catalog.MOST_GPUS, help="Number of GPUs, eight to a node.")
    ] = None,
    input_tokens: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Prompt of a request.")
    ] = 4096,
    output_tokens: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Answer of a request.")
    ] = 1024,
    concurrency: Annotated[int, typer.Option(min=1, max=LARGEST, help="Requests at a time.")] = 32,
    rate: Annotated[
        float | None,
        typer.Option(callback=positive, help="Requests per second instead of --concurrency."),
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(callback=positive, help="Limit on time to first token, ms.")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(callback=positive, help="Limit on time per token, ms.")
    ] = None,
    objective: Annotated[str, typer.Option(help=f"One of {', '.join(OBJECTIVES)}.")] = "balanced",
    task: Annotated[str, typer.Option(help="Whose acceptance: math, code, chat, a task.")] = "chat",
    acceptance_file: Annotated[
        Path | None,
        typer.Option(
            "--acceptance", help="Your own: YAML or JSON, `conditional`, by --task or not."
        ),
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(
            min=1,
            max=catalog.MOST_GPUS,
            callback=positive,
            help="Busiest expert rank over the mean.",
        ),
    ] = 1.0,
    top: Annotated[int, typer.Option(min=1, help="Layouts to print.")] = 5,
    explain: Annotated[bool, typer.Option("--explain", help="Say why.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, all of --explain in it.")
    ] = False,
    preset: Annotated[
        Path | None, typer.Option(help="Write the best as a file for `sglang-ext launch`.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the best layout (.svg).")] = None,
    table: Annotated[
        str | None, typer.Option(help=f"Print a published table: {', '.join(TABLES)}.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Plot --table.")] = None,
    validate_file: Annotated[
        Path | None,
        typer.Option(
            "--validate",
            help="Bench results: JSON lines, or what `sglang-ext bench --out` wrote, with its "
            "--model and --hardware.",
        ),
    ] = None,
) -> None:
    """Rank the parallel layouts of a model on a machine, without either of them.

    Exits with 2 for a mistake in the question, or when nothing fits.

    Example:

        sglang-ext plan --model deepseek-v4-flash --hardware 8xh200 --concurrency 128 --explain
    """
    output_file("--preset", preset, (".yaml", ".yml"))
    output_file("--picture", picture, (".svg",))
    check_plot("--plot", plot_file)
    keep_apart({"--acceptance": acceptance_file, "--preset": preset, "--picture": picture})
    _need("--plot", plot_file, "--table", table)
    if table is not None:
        useless = options_but(ctx, "--table", "--plot", "--json")
        refuse_without_effect(ctx, "beside --table", *useless)
        _print_table(table, as_json, plot_file)
        return
    if validate_file is not None:
        useless = options_but(ctx, "--validate", "--json", "--model", "--hardware")
        refuse_without_effect(ctx, "beside --validate", *useless)
        _print_validation(validate_file, model, hardware, as_json)
        return
    asked = catalog.model(_given(model, "--model", catalog.names("base")))
    _has_effect(ctx, asked)
    curve = None
    if acceptance_file is not None:
        curve = acceptance.from_file(acceptance_file, task if is_given(ctx, "--task") else None)
    question = Question(
        model=asked,
        hardware=_machine(hardware, gpus),
        load=catalog.Load(input_tokens, output_tokens, concurrency),
        objective=_objective(objective),
        ttft=None if ttft is None else ttft / 1e3,
        tpot=None if tpot is None else tpot / 1e3,
        task=task,
        assumptions=replace(DEFAULT, imbalance=imbalance),
        curve=curve,
    )
    if rate is not None:
        wanted = concurrency_of_rate(question, rate)
        question = replace(question, load=replace(question.load, concurrency=wanted))
    _print_answer(search(question), rate, top, explain, as_json, preset, picture)


def _need(option: str, value: object, needed: str, there: object) -> None:
    """An option that would be passed over without another is a mistake."""
    if value is not None and there is None:
        raise ConfigError(
            "plan", option, expected=f"{needed} beside it", found="none", remedy=f"Add {needed}."
        )


def _has_effect(ctx: typer.Context, model: catalog.Model) -> None:
    """Raises InputError for an option of a load that another one, or the model, makes useless."""
    if is_given(ctx, "--rate"):
        refuse_without_effect(ctx, "beside --rate", "--concurrency")
    if not model.drafts:
        refuse_without_effect(
            ctx, f"for {model.name}, which has no draft", "--task", "--acceptance"
        )
    if not read_shape(model.config, model.name).experts:
        refuse_without_effect(ctx, f"for {model.name}, which has no experts", "--imbalance")


def _given(value: str | None, option: str, known: list[str]) -> str:
    if value is None:
        raise ConfigError(
            "plan",
            option,
            expected="a value",
            found="nothing",
            remedy=f"Known: {', '.join(known)}.",
        )
    return value


def _machine(name: str | None, gpus: int | None) -> catalog.Hardware:
    name = _given(name, "--hardware", catalog.names("gpus"))
    if gpus is None:
        if name in catalog.names("gpus") and name != "cpu":
            raise ConfigError(
                "plan",
                "--gpus",
                expected="a number of GPUs",
                found="nothing",
                remedy=f"Add --gpus, or use --hardware 8x{name}.",
            )
        return catalog.hardware(name)
    if gpus < 1 or (gpus > 8 and gpus % 8):
        raise ConfigError(
            "plan",
            "--gpus",
            expected="1 to 8, or a multiple of 8",
            found=gpus,
            remedy="Nodes hold eight GPUs; other machines: --hardware NODESxGPUSxGPU.",
        )
    if name == "cpu" or "x" in name:
        raise ConfigError(
            "plan",
            "--gpus",
            expected="a GPU's name in --hardware beside it",
            found=name,
            remedy="Leave out --gpus, or name the GPU alone: --hardware h100 --gpus 4.",
        )
    return catalog.hardware(f"{gpus}x{name}" if gpus <= 8 else f"{gpus // 8}x8x{name}")


def _objective(name: str) -> Objective:
    for known in get_args(Objective):
        if name == known:
            return known
    raise ConfigError(
        "plan",
        "--objective",
        expected=f"one of {', '.join(OBJECTIVES)}",
        found=name,
        remedy=nearest(name, OBJECTIVES) or "Choose one of them.",
    )


def _print_answer(
    answer: Answer,
    rate: float | None,
    top: int,
    explain: bool,
    as_json: bool,
    preset: Path | None,
    picture: Path | None,
) -> None:
    best = answer.ranked[0]
    if preset is not None:
        preset.write_text(report.preset_yaml(report.preset_of(answer, best)), encoding="utf-8")
    if picture is not None:
        picture.write_text(draw(answer, best), encoding="utf-8")
    if as_json:
        shown = report.as_json(answer, top)
        if rate is not None:
            shown["rate"] = {"per_second": rate, "concurrency_basis": best.basis}
        typer.echo(json.dumps(shown, indent=1))
        return
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    console.print(report.table_of(answer, top))
    if rate is not None:
        many = answer.question.load.concurrency
        console.print(f"{many} at a time for {rate:g} a second ({best.basis})", markup=False)
    console.print(f"all times and drafts {best.basis}; memory derived", markup=False)
    if explain:
        for line in report.explanation(answer):
            typer.echo(line)


def _print_table(name: str, as_json: bool, plot_file: Path | None) -> None:
    if name not in TABLES:
        raise ConfigError(
            "plan",
            "--table",
            expected=f"one of {', '.join(TABLES)}",
            found=name,
            remedy=nearest(name, TABLES) or "Choose one of them.",
        )
    found = TABLES[name]()
    if plot_file is not None:
        plot(name, plot_file)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
        return
    shown = Table(*found.columns, title=found.title)
    for row in found.rows:
        shown.add_row(*row)
    console = Console(width=120, highlight=False)
    console.print(shown)
    said = "derived from the published example's constants"
    console.print(said + ("; its acceptance is assumed" if found.basis == "assumed" else ""))


def _print_validation(path: Path, model: str | None, hardware: str | None, as_json: bool) -> None:
    found = validate(path, model, hardware)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    shown = Table("region", "metric", "points", "median error", "p90 error")
    for r in found.regions:
        shown.add_row(r.name, r.metric, str(r.points), f"{r.median:.1%}", f"{r.p90:.1%}")
    console = Console(width=120, highlight=False)
    console.print(shown)
    console.print(f"layout pairs ranked right: {found.ranked_right} of {found.pairs}")
    console.print(f"compared: the file's measured numbers with {found.basis} ones", markup=False)
    if found.left_out:
        console.print(f"left out, no prediction for: {', '.join(found.left_out)}", markup=False)
