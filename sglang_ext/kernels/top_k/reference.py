"""The best entries of one row at a time, by a plain sort."""

from __future__ import annotations

import torch
from torch import Tensor


def best_entries_reference(scores: Tensor, values: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """See `api.best_entries`."""
    batch, rows, entries = scores.shape
    out = torch.full((batch, rows, min(top_k, entries)), -1, dtype=torch.int64)
    for b in range(batch):
        for n in range(rows):
            known = scores[b, n, : int(visible[b, n])].tolist()
            order = sorted(range(len(known)), key=lambda j: (-known[j], j))
            best = [int(values[b, j]) for j in sorted(order[:top_k])]
            out[b, n, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return out
