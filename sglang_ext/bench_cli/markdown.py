"""The results as a Markdown table that says what it was measured on, and its place in a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.bench_cli.results import Results, server_name
from sglang_ext.inputs import InputError
from sglang_ext.launcher.paths import demo_folder_names
from sglang_ext.lossless.report import NOT_SHOWN

BEGIN, END = "<!-- sglang-ext bench -->", "<!-- end of sglang-ext bench -->"
BUILT_IN = "SmolLM2-135M-Instruct (the built-in model)"


def table(results: Results) -> str:
    """One row per load, the servers side by side; then what was measured with what."""
    rows = results.ratios()
    names = list(dict.fromkeys(r["server"] for r in rows if r["algorithm"] != "none"))
    loads = list(dict.fromkeys((r["data"], r["concurrency"]) for r in rows))
    found = {(r["data"], r["concurrency"], r["server"]): r for r in rows}
    heads = [f"{n}, tok/s (ratio, acceptance length)" for n in names]
    lines = [_row(["data", "at a time", "no speculation, tok/s", *heads])]
    lines.append("|---" * (3 + len(names)) + "|")
    for data, many in loads:
        base = found.get((data, many, "none"))
        cells = [data, str(many), f"{base['output_tokens_per_second']:.1f}" if base else "-"]
        lines.append(_row([*cells, *(_cell(found.get((data, many, n))) for n in names)]))
    said = [_model(results), _machine(results), _load(results), _gates(results), results.unsteady()]
    return "\n".join([*lines, "", " ".join(filter(None, said)), ""])


def placed(text: str, path: Path) -> str:
    """The page with `text` between its two markers; a new one where there is none yet.

    Raises:
        InputError: the page holds other things and no place for the table, or cannot be read.
    """
    whole = f"{BEGIN}\n{text}{END}\n"
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise InputError(
            "--markdown", expected="a page of text", found=error, remedy="Name another."
        ) from error
    if not page.strip():
        return whole
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise InputError(
            "--markdown", expected=f"a new page, or one with {BEGIN} and {END} once, in this order",
            found=path, remedy="Put the two lines where the table is to stand.",
        )  # fmt: skip
    return f"{before}{BEGIN}\n{text}{END}{after}"


def _model(results: Results) -> str:
    words = list(results.data["launch_arguments"])
    name = ""
    if "--model-path" in words[:-1]:
        at = words.index("--model-path")
        path = words[at + 1]
        del words[at : at + 2]
        folder = Path(path).is_absolute() or path.startswith(".")
        is_ours = path == demo_folder_names()["target"]
        name = BUILT_IN if is_ours else Path(path).name if folder else path
    given = f"`{shlex.join(words)}`" if words else ""
    return f"{', '.join(filter(None, [name, given]))}." if name or given else ""


def _machine(results: Results) -> str:
    machine = results.data["machine"]
    said = machine["device"]
    if said == "CPU":
        said = machine.get("cpu") or machine["processor"]
    said += f", {machine['cpus']} CPUs"
    many = machine.get("threads")
    said += f", {many} thread{'s' if many > 1 else ''}" if many else ""
    busy = sorted(results.loads())
    said += f", load average {_range([f'{load:.1f}' for load in busy])}" if busy else ""
    versions = {"SGLang": "sglang", "sglang-ext": "sglang_ext", "torch": "torch"}
    used = (f"{name} {machine[key]}" for name, key in versions.items() if key in machine)
    return f"{said}; {', '.join(used)}."


def _load(results: Results) -> str:
    load, points = results.data["load"], results.data["points"].values()
    serving = load["tool"] == "serving"
    said = "bench_serving" if serving else "bench_one_batch_server"
    count = sorted(p["completed"] for p in points if p.get("completed"))
    said += f", {_range(count)} requests a point" if count else ""
    length = sorted(p["input_tokens"] for p in points if p.get("input_tokens"))
    said += f", {_range(length)} tokens in on average" if length else ""
    said += f", {load['output_tokens']} out, "
    said += f"temperature {load['temperature']:g}" if load["temperature"] else "greedy"
    said += ", in chat format" if load["chat"] else ""
    return f"{said}; tok/s counts answers, ratios are against no speculation under the same load."


def _gates(results: Results) -> str:
    gates = list(results.data["gates"].values())
    said = (
        f"{server_name(gate, gates)}: {gate['statement'].removesuffix(f'; {NOT_SHOWN}')}"
        for gate in gates
    )
    found = "; ".join(said)
    return f"`sglang-ext lossless` before each was timed: {found}." if found else ""


def _range(ordered: Sequence[object]) -> str:
    least, most = ordered[0], ordered[-1]
    return f"{least}" if least == most else f"{least} to {most}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    length = row.get("acceptance_length")
    more = [f"{row['ratio']:.2f}x"] if row["ratio"] else []
    more += [f"{length:.2f}"] if length else []
    speed = f"{row['output_tokens_per_second']:.1f}"
    return f"{speed} ({', '.join(more)})" if more else speed


def _row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
