"""Curves over the context length, a panel for each model, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Curves = Mapping[str, Sequence[float]]


def over_context(
    panels: Mapping[str, tuple[Sequence[float], Curves]], ylabel: str, path: Path
) -> None:
    """panels: title -> contexts in tokens, and curves by label, a value per context."""
    import matplotlib.pyplot as plt

    size = (6 * len(panels), 4)
    figure, axes_of = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for axes, (title, (contexts, curves)) in zip(axes_of[0], panels.items(), strict=True):
        for label, values in curves.items():
            axes.loglog(contexts, values, marker="o", label=label)
        axes.set(title=title, xlabel="context, tokens", ylabel=ylabel)
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
