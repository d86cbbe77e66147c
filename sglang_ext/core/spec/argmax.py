"""Argmax over a vocabulary, several times faster than torch's on a CPU.

torch tracks indices element by element; maxima of short runs vectorise, and only the run that
holds the winner is searched for its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RUNS = (256, 128, 64)
# Below this one pass is cheaper than the extra operations.
_SMALL = 32_000


def row_argmax(values: Tensor) -> Tensor:
    """Index of the first largest value of each row, as torch.argmax finds it; [n, V] -> [n]"""
    rows, size = values.shape
    run = next((width for width in _RUNS if size % width == 0), None)
    if values.device.type != "cpu":
        return values.argmax(dim=-1)
    if run is None or rows * size < _SMALL:
        return values.max(dim=-1).indices
    runs = values.unflatten(-1, (size // run, run))
    winner = runs.amax(dim=-1).argmax(dim=-1)
    inside = runs[torch.arange(rows), winner].argmax(dim=-1)
    return winner.mul_(run).add_(inside)
