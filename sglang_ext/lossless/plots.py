"""Pictures of a result: margins of the base, gaps of divergences, p-values against uniform."""

from __future__ import annotations

import base64
import io
from importlib import import_module
from typing import Any

from sglang_ext.lossless.suite import Result

_TIE = 1e-6  # nats; below what any log-probability tells


def missing() -> list[str]:
    """What keeps `plots` from drawing, as lines of the report."""
    try:
        import_module("matplotlib")
    except ImportError:
        return ["no plots: matplotlib is not installed (pip install 'sglang-ext[plots]')"]
    return []


def plots(result: Result) -> list[tuple[str, str]]:
    """(title, PNG in base64); none where something is `missing`."""
    if missing():
        return []
    import matplotlib

    matplotlib.use("Agg")
    found = []
    every = [row for o in result.outcomes for row in o.details.get("margins", ())]
    rows = [row for row in every if any(margin is not None for margin in row)]
    gaps = [
        (abs(row["gap"]), bool(row["explained"]))
        for outcome in result.outcomes
        for row in outcome.details.get("divergences", ())
        if row["gap"] is not None
    ]
    bound = next((o.details["bound"] for o in result.outcomes if "bound" in o.details), None)
    if rows:
        differing = [
            (row["position"], row["margin"])
            for outcome in result.outcomes
            for row in outcome.details.get("divergences", ())
            if row["margin"] is not None
        ]
        found.append(("Margins of the base along its answers", _margins(rows, differing, bound)))
    if gaps:
        found.append(("Gaps of greedy divergences", _gaps(gaps, bound)))
    values = [
        test["p"]
        for outcome in result.outcomes
        for test in outcome.details.get("tests", ())
        if test["degrees_of_freedom"] and test["prompt"] != "all prompts"
    ]
    if values:
        found.append(("p-values of the sampled tests", _quantiles(values)))
    return found


def _margins(
    rows: list[list[float | None]], differing: list[tuple[int, float]], bound: float | None
) -> str:
    """rows: [answer][token]; differing: (token, margin) of the greedy divergences"""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    told = [(at, m) for row in rows for at, m in enumerate(row, start=1) if m is not None]
    # A tie has no place on a logarithmic axis.
    axes.plot(*zip(*((at, max(m, _TIE)) for at, m in told), strict=True), ".", markersize=2)
    if differing:
        at = [(position + 1, max(margin, _TIE)) for position, margin in differing]
        axes.plot(*zip(*at, strict=True), "rx", label="answers part")
    if bound is not None:
        axes.axhline(max(bound, _TIE), color="black", linestyle="--", label="bound")
    axes.set(xlabel="token of the answer", ylabel="top-2 margin in nats", yscale="log")
    if differing or bound is not None:
        axes.legend()
    return _png(figure)


def _gaps(gaps: list[tuple[float, bool]], bound: float | None) -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    sides = [[g for g, explained in gaps if explained], [g for g, e in gaps if not e]]
    axes.hist(sides, bins=20, stacked=True, label=("explained", "unexplained"))
    if bound is not None:
        axes.axvline(bound, color="black", linestyle="--", label="bound")
    axes.set(xlabel="gap in nats", ylabel="divergences")
    axes.legend()
    return _png(figure)


def _quantiles(values: list[float]) -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5, 4.5), layout="constrained")
    ordered = [max(p, 1e-16) for p in sorted(values)]
    uniform = [(i + 0.5) / len(ordered) for i in range(len(ordered))]
    axes.loglog(uniform, ordered, ".")
    axes.loglog([uniform[0], 1], [uniform[0], 1], color="black", linewidth=0.8)
    axes.set(xlabel="uniform quantile", ylabel="p-value")
    return _png(figure)


def _png(figure: Any) -> str:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()
