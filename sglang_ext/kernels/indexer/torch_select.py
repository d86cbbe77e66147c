"""Selection in torch: keys gathered once per request, scores by chunks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.indexer_v4 import choose, index_scores, positions_of

# Scores of one chunk before the heads are summed, in elements: 64 MiB of float32.
CHUNK_ELEMENTS = 1 << 24


def select_entries_torch(
    q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """See `api.select_entries`; arguments are taken as checked."""
    batch, rows, heads, _ = q.shape
    entries = slots.shape[1]
    width = min(top_k, entries)
    if entries <= top_k:
        column = torch.arange(entries, device=slots.device)
        seen = column < visible.unsqueeze(-1)
        return torch.where(seen, slots.unsqueeze(1), -1)
    keys = pool[slots]
    step = max(CHUNK_ELEMENTS // max(batch * heads * entries, 1), 1)
    out = slots.new_empty(batch, rows, width)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        chosen = choose(index_scores(q[:, part], weights[:, part], keys), visible[:, part], top_k)
        index = positions_of(chosen.flatten(0, 1), width).view(batch, -1)
        found = slots.gather(1, index.clamp(min=0)).masked_fill_(index < 0, -1)
        out[:, part] = found.view(batch, -1, width)
    return out
