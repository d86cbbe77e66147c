"""The README's speed table from the figures of `bench.ratios`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang_ext.bench_cli.results import cpu_name


def environment(load_before: float) -> dict[str, Any]:
    """What the figures were taken on. load_before: load average when the run began."""
    import sglang
    import torch

    flags = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        flags = next((x for x in info.read_text().splitlines() if x.startswith("flags")), "")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "amx_bf16": "amx_bf16" in flags,
        "avx512_bf16": "avx512_bf16" in flags,
        "torch": torch.__version__,
        "sglang": sglang.__version__,
        "load_average": [load_before, os.getloadavg()[0]],
    }


def markdown(result: dict[str, Any]) -> str:
    """A table of ratios with their goals, and a line on the machine."""
    rows = [*_speculation(result), *_plain(result)]
    lines = ["| ratio | measured | goal |", "|---|---|---|"]
    lines += [f"| {name} | {value} | {goal} |" for name, value, goal in rows]
    return "\n".join([*lines, "", *_tokens_per_second(result), "", _machine(result["environment"])])


def _speculation(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Only DSPARK with its scheduler has goals; the others stand beside it."""
    rows = []
    for name, entry in result["servers"].items():
        if name in ("none", "sglang_layers"):
            continue
        goals = ("all 1.5, math and code 1.8", "1.0 at each", "0.85", "at most 15 %")
        if name != "dspark":
            goals = ("", "", "", "")
        rows += _one_drafter(name.replace("_", " "), entry, goals)
    return rows


def _one_drafter(
    title: str, entry: dict[str, Any], goals: tuple[str, str, str, str]
) -> list[tuple[str, str, str]]:
    alone = "; ".join(f"{kind} {value:.2f}" for kind, value in entry["batch_1"].items())
    crowd = ", ".join(f"{n}: {x['ratio']:.2f}" for n, x in entry["concurrency"].items())
    rows = [
        (f"{title} / no speculation, batch 1", alone, goals[0]),
        (f"{title} / no speculation by concurrency", crowd, goals[1]),
    ]
    if "round" in entry:
        found = entry["round"]
        ideal = f"{title} / ideal ({found['ideal']:.2f} at tau {found['tau']:.2f})"
        outside = f"{title}: share of a round outside the two model calls"
        rows.append((ideal, f"{entry['of_ideal']:.2f}", goals[2]))
        rows.append((outside, f"{100 * found['outside']:.0f} %", goals[3]))
    return rows


def _plain(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    bare, step = result["forward_ms"]["rows_1"]["bare_loop"], result["decode_step_ms"]
    rows = [
        (
            f"bare loop ({bare:.1f} ms) / decode step of the server ({step:.1f} ms)",
            f"{bare / step:.2f}",
            "0.75",
        )
    ]
    rows += [
        (name, f"{value:.2f}", "1.2" if "HF" in name else "")
        for name, value in result["ratios_peers"].items()
    ]
    first = result["forward_ms"]["rows_1"]["fast"]
    costs = ", ".join(
        f"{name.removeprefix('rows_')}: {times['fast'] / first:.2f}"
        for name, times in result["forward_ms"].items()
    )
    rows.append(("target pass by rows / pass of one row", costs, ""))
    gain = result["forward_ms"]["rows_1"]["sglang"] / first
    rows.append(("SGLang's own layers / ours, one row", f"{gain:.2f}", ""))
    return rows


def _tokens_per_second(result: dict[str, Any]) -> list[str]:
    counts = next(iter(result["servers"].values()))["concurrency"]
    lines = ["| tokens/s | batch 1 | " + " | ".join(f"x {n}" for n in counts) + " |"]
    lines.append("|---" * (len(counts) + 2) + "|")
    for name, entry in result["servers"].items():
        cells = [f"{x['tokens_per_second']:.0f}" for x in entry["concurrency"].values()]
        speed = f"{entry['tokens_per_second']:.1f}"
        lines.append(f"| {name.replace('_', ' ')} | {speed} | " + " | ".join(cells) + " |")
    return lines


def _machine(found: dict[str, Any]) -> str:
    return (
        f"{found['cpu']}, {found['cores']} cores, AMX bf16 {'yes' if found['amx_bf16'] else 'no'}; "
        f"torch {found['torch']}, sglang {found['sglang']}; load average "
        f"{found['load_average'][0]:.1f} before, {found['load_average'][1]:.1f} after"
    )
