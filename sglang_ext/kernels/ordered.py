"""The best entries of a list, in order, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_ext.core.indexer_v32 import choose

# Scores that exist at a time, in elements: 256 MiB of float32.
CHUNK_ELEMENTS = 1 << 26

Scores = Callable[[slice, Tensor], Tensor]


def select_best(scores: Scores, values: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Values of each row's best entries among those it sees, in order, -1 after the last.

    scores: gives those of some rows, [batch, rows of the slice, entries], for their `visible`.
    values [batch, entries] int64, visible [batch, rows] int64
    -> [batch, rows, min(top_k, entries)] int64.
    """
    batch, rows = visible.shape
    entries = values.shape[1]
    if entries <= top_k:
        seen = torch.arange(entries, device=values.device) < visible.unsqueeze(-1)
        return torch.where(seen, values.unsqueeze(1), -1)
    step = max(CHUNK_ELEMENTS // max(batch * entries, 1), 1)
    out = values.new_empty(batch, rows, top_k)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        seen = visible[:, part].contiguous()
        out[:, part] = chosen_values(choose(scores(part, seen), seen, top_k), values, top_k)
    return out


def chosen_values(chosen: Tensor, values: Tensor, width: int) -> Tensor:
    """Values of the True entries in order, -1 after the last.

    chosen [batch, rows, entries] bool, at most `width` True in a row; values [batch, entries]
    -> [batch, rows, width] int64.
    """
    batch, rows, _ = chosen.shape
    # What is not chosen goes to one place too many, which is cut off.
    place = torch.where(chosen, chosen.cumsum(dim=-1) - 1, width)
    out = values.new_full((batch, rows, width + 1), -1)
    out.scatter_(2, place, values.unsqueeze(1).expand_as(place))
    return out[..., :width]
