"""Selection by scores that are made for some rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_ext.kernels.top_k import best_entries

# Scores that exist at a time, in elements: 256 MiB of float32.
CHUNK_ELEMENTS = 1 << 26

Scores = Callable[[slice, Tensor], Tensor]


def select_best(scores: Scores, values: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Values of each row's best entries among those it sees, in order, -1 after the last.

    scores: gives those of some rows, [batch, rows of the slice, entries], for their `visible`.
    values [batch, entries] int64, visible [batch, rows] int64
    -> [batch, rows, min(top_k, entries)] int64. Runs in Triton.
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
        out[:, part] = best_entries(
            scores(part, seen), values, seen, top_k, implementation="triton"
        )
    return out
