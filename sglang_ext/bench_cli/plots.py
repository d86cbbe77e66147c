"""Speed, ratio, time per token and acceptance by concurrency, a column per data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_ext.lossless.errors import CannotTest

# Rows of panels, from the top: label of the axis, field of a result.
_PANELS = (
    ("output tokens / s", "output_tokens_per_second"),
    ("/ no speculation", "ratio"),
    ("TPOT, ms", "median_tpot_ms"),
    ("acceptance length", "acceptance_length"),
)


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

    names = sorted({row["data"] for row in rows})
    figure, panels = pyplot.subplots(
        len(_PANELS),
        len(names),
        figsize=(4.2 * len(names), 10),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    steps = sorted({row["concurrency"] for row in rows})
    for column, name in enumerate(names):
        for label, lines in _lines([row for row in rows if row["data"] == name]).items():
            at = [row["concurrency"] for row in lines]
            for panel, (_, field) in zip(panels[:, column], _PANELS, strict=True):
                panel.plot(at, [row.get(field) or float("nan") for row in lines], "o-", label=label)
        for panel, (title, _) in zip(panels[:, column], _PANELS, strict=True):
            panel.set(ylabel=title, xscale="log")
            panel.set_xticks(steps, [str(step) for step in steps])
            panel.minorticks_off()
        panels[0][column].set_title(name)
        panels[-1][column].set_xlabel("concurrency")
        panels[0][column].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        lines.setdefault(row["server"], []).append(row)
    return lines
