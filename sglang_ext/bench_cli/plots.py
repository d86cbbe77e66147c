"""Tokens per second and their ratio by concurrency, a panel per data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_ext.lossless.errors import CannotTest


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a .png. Raises CannotTest without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise CannotTest(
            "--plot", expected="matplotlib", found="none", remedy="pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({row["dataset"] for row in rows})
    figure, panels = pyplot.subplots(
        2, len(names), figsize=(4.2 * len(names), 6), squeeze=False, layout="constrained"
    )
    for column, name in enumerate(names):
        for label, lines in _lines([row for row in rows if row["dataset"] == name]).items():
            at = [row["concurrency"] for row in lines]
            speed = [row["output_tokens_per_second"] for row in lines]
            panels[0][column].plot(at, speed, "o-", label=label)
            ratios = [row["ratio"] or float("nan") for row in lines]
            panels[1][column].plot(at, ratios, "o-", label=label)
        panels[0][column].set(title=name, ylabel="output tokens / s", xscale="log")
        panels[1][column].set(xlabel="concurrency", ylabel="/ no speculation", xscale="log")
        panels[0][column].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        gamma = "" if row["gamma"] is None else f", gamma {row['gamma']}"
        lines.setdefault(row["algorithm"] + gamma, []).append(row)
    return lines
