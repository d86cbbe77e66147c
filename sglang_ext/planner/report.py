"""A plan as a table, as text and as JSON; each number with where it comes from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml
from rich.table import Table

from sglang_ext.launcher.catalog import Preset
from sglang_ext.planner.explain import rivals, ties, top_terms
from sglang_ext.planner.layout import to_preset
from sglang_ext.planner.memory import GB
from sglang_ext.planner.numbers import Number
from sglang_ext.planner.search import (
    Answer,
    Plan,
    balancing_pays_from,
    budgets,
    drafting_loses_beyond,
    overlap_pays_from,
)

# A preset serves requests up to this length even when its load is shorter.
SHORTEST_CONTEXT = 32768


def fraction_of(plan: Plan, most: float = 1.0) -> float:
    """`--mem-fraction-static`: the largest valid share, rounded down to a hundredth, or less.

    most: the largest that has been seen to work, kept to where the load fits under it
    """
    memory = plan.memory
    if memory.smallest_fraction <= most < memory.largest_fraction:
        return most
    rounded = (int(memory.largest_fraction * unit) / unit for unit in (100, 1000, 10_000))
    fitting = (share for share in rounded if share >= memory.smallest_fraction)
    return next(fitting, memory.largest_fraction)


def preset_of(answer: Answer, plan: Plan, name: str = "plan") -> Preset:
    """The preset that serves a plan."""
    q = answer.question
    flags: dict[str, Any] = {}
    source = ""
    if not q.hardware.gpu.is_cpu:
        most = q.model.reported.shares.get(q.hardware.gpu.name, 1.0)
        flags["mem-fraction-static"] = fraction_of(plan, most)
        if flags["mem-fraction-static"] == most:
            source = f"; mem-fraction-static: {q.model.reported.source}"
        length = q.load.input_tokens + q.load.output_tokens
        flags["context-length"] = min(answer.shape.longest, max(length, SHORTEST_CONTEXT))
    load = q.load
    asked = f"{load.concurrency} requests of {load.input_tokens} + {load.output_tokens} tokens"
    asked += f", acceptance of {q.curve.source}" if q.curve else f", task {q.task}"
    limits = {"TTFT": q.ttft, "TPOT": q.tpot}
    asked += "".join(f", {n} up to {v * 1e3:g} ms" for n, v in limits.items() if v is not None)
    return to_preset(
        plan.layout,
        q.model,
        q.hardware,
        load.concurrency,
        name=name,
        flags=flags,
        point=q.objective,
        load=load,
        source=f"sglang-ext plan for {asked}; never started on this hardware{source}",
    )


def preset_yaml(preset: Preset) -> str:
    """The text of a preset file, as `sglang-ext launch FILE` reads it."""
    raw: dict[str, Any] = {
        "model": preset.model,
        "hardware": preset.hardware,
        "point": preset.point,
        "parts": list(preset.parts),
        "flags": preset.flags,
        "env": preset.env,
        "load": asdict(preset.load) if preset.load else {},
        "status": preset.status,
        "source": preset.source,
    }
    kept = {k: v for k, v in raw.items() if v}
    return yaml.safe_dump(kept, sort_keys=False, width=98, default_flow_style=None)


def numbers_of(answer: Answer, plan: Plan) -> dict[str, Number]:
    """The predictions of a plan with their basis."""
    context = answer.question.load.input_tokens + answer.question.load.output_tokens / 2
    basis = plan.basis
    numbers = {
        "throughput": Number(plan.throughput, "output tok/s", basis),
        "tpot": Number(plan.tpot * 1e3, "ms", basis),
        "ttft": Number(plan.ttft * 1e3, "ms, no queue", basis),
        "round": Number(plan.round.total * 1e3, "ms", basis),
        "memory per rank": Number(plan.memory.total / GB, "GiB", "derived"),
        "smallest mem-fraction-static": Number(plan.memory.smallest_fraction, "", "derived"),
        "largest mem-fraction-static": Number(plan.memory.largest_fraction, "", "derived"),
    }
    if plan.curve is not None:
        numbers["tokens per round"] = Number(plan.advance, "tokens", plan.curve.basis)
        limit = drafting_loses_beyond(plan, context)
        if limit is not None:
            numbers["batch per group beyond which drafting loses"] = Number(limit, "", basis)
    if answer.shape.moe_layers and plan.layout.a2a != "none":
        start = overlap_pays_from(plan, context)
        if start is not None:
            numbers["batch per group from which two-batch overlap pays"] = Number(start, "", basis)
    if (skew := balancing_pays_from(plan, context)) is not None:
        numbers["imbalance of experts from which EPLB pays"] = Number(skew, "x the mean", basis)
    return numbers


def table_of(answer: Answer, top: int) -> Table:
    """The ranking, best first."""
    q = answer.question
    table = Table(title=f"{q.model.name} on {q.hardware.name}, {q.objective}")
    for column in ("#", "layout", "tok/s", "TPOT ms", "TTFT ms", "GiB/rank", "drafts", "limits"):
        table.add_column(column, overflow="fold")
    for place, plan in enumerate(answer.ranked[:top], 1):
        table.add_row(
            str(place),
            plan.layout.name,
            f"{plan.throughput:.0f}",
            f"{plan.tpot * 1e3:.2f}",
            f"{plan.ttft * 1e3:.1f}",
            f"{plan.memory.total / GB:.1f}",
            str(plan.drafts),
            "; ".join(plan.misses) or "met",
        )
    return table


def explanation(answer: Answer) -> list[str]:
    """The best layout's numbers, memory, verify budgets, assumptions and rivals, line by line."""
    best = answer.ranked[0]
    context = answer.question.load.input_tokens + answer.question.load.output_tokens / 2
    lines = [f"best: {best.layout.name}"]
    lines += [f"  {name}: {number}" for name, number in numbers_of(answer, best).items()]
    lines.append("memory per rank, GiB (derived):")
    lines += [f"  {size / GB:8.2f}  {name}" for name, size in best.memory.terms().items() if size]
    lines.append(f"largest parts of a round ({best.basis}):")
    lines += [f"  {seconds * 1e3:8.3f} ms  {name}" for name, seconds in top_terms(best)]
    if best.curve is not None:
        lines.append(f"acceptance ({best.curve.basis}): {best.curve.source}")
        budget = ", ".join(f"{b}: {k}" for b, k in budgets(best, context).items())
        lines.append(f"verify budget K by batch per group ({best.basis}): {budget}")
    lines.append("assumed of kernels and hosts (see docs/planner.md):")
    given = answer.question.assumptions
    lines += [f"  {n} = {v:g} ({given.basis_of(n)})" for n, v in asdict(given).items()]
    for name in ties(answer):
        lines.append(f"tied, the model cannot tell it apart: {name}")
    for rival in rivals(answer):
        loss = "; ".join(rival.misses) or f"{rival.behind:.1%} of {rival.of}"
        lines.append(f"loses by {loss} ({best.basis}): {rival.name}")
        lines.append(f"  measure {rival.measurement}")
    if answer.refused:
        lines.append(f"refused: {len(answer.refused)} layouts")
        reasons = list(answer.refused.values())
        for reason in sorted(set(reasons), key=lambda r: -reasons.count(r))[:5]:
            lines.append(f"  {reasons.count(reason):3d} x {reason}")
    return lines


def as_json(answer: Answer, top: int) -> dict[str, Any]:
    """Everything a program needs: ranked layouts, numbers with their basis, the best preset."""
    best = answer.ranked[0]
    context = answer.question.load.input_tokens + answer.question.load.output_tokens / 2
    return {
        "model": answer.question.model.name,
        "hardware": answer.question.hardware.name,
        "objective": answer.question.objective,
        "load": asdict(answer.question.load),
        "ranked": [_plan_json(answer, plan) for plan in answer.ranked[:top]],
        "verify_budget": budgets(best, context) if best.curve else {},
        "verify_budget_basis": best.basis,
        "acceptance": _curve_json(best),
        "assumptions": {
            name: {"value": value, "basis": answer.question.assumptions.basis_of(name)}
            for name, value in asdict(answer.question.assumptions).items()
        },
        "ties": ties(answer),
        "rivals": [asdict(rival) | {"basis": best.basis} for rival in rivals(answer)],
        "refused": answer.refused,
        "preset": yaml.safe_load(preset_yaml(preset_of(answer, best))),
    }


def _curve_json(plan: Plan) -> dict[str, Any] | None:
    if plan.curve is None:
        return None
    return {
        "conditional": list(plan.curve.conditional),
        "basis": plan.curve.basis,
        "source": plan.curve.source,
    }


def _plan_json(answer: Answer, plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.layout.name,
        "sizes": asdict(plan.layout),
        "numbers": {name: asdict(number) for name, number in numbers_of(answer, plan).items()},
        "memory_bytes": plan.memory.terms(),
        "memory_basis": "derived",
        "round_seconds": plan.round.terms(),
        "round_basis": plan.basis,
        "drafts": plan.drafts,
        "drafts_basis": plan.basis,
        "misses": list(plan.misses),
    }
