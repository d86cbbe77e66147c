"""Two pictures of a result: gaps of greedy divergences, and p-values against the uniform law."""

from __future__ import annotations

import base64
import io
from typing import Any

from sglang_ext.lossless.suite import Result


def plots(result: Result) -> list[tuple[str, str]]:
    """(title, PNG in base64); none where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    found = []
    gaps = [
        (abs(row["gap"]), bool(row["explained"]))
        for outcome in result.outcomes
        for row in outcome.details.get("divergences", ())
        if row["gap"] is not None
    ]
    bound = next((o.details["bound"] for o in result.outcomes if "bound" in o.details), None)
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
