"""The base of all ratios has two turns, before and after the other settings; its figures are means.

A machine that others use changes its pace over the minutes between two servers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

# Beyond it a sum of two is no number; the readers of the file refuse such a figure.
_HUGE = 1e300


def averaged(
    points: Mapping[str, Mapping[str, Any]], again: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The points by key; those with a second turn have the mean of every figure of both.

    Points as the results file has them: figures are numbers, the rest stays that of the first turn.
    """
    return {key: _mean(point, again.get(key, {})) for key, point in points.items()}


def _mean(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: statistics.fmean((value, second[name]))
        for name, value in first.items()
        if _is_figure(value) and _is_figure(second.get(name)) and value != second[name]
    }
    return {**first, **both}


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE
