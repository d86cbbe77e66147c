"""Naive selection: one row at a time, scores in float32, a plain sort."""

from __future__ import annotations

import torch
from torch import Tensor


def select_entries_reference(
    q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """See `api.select_entries`."""
    batch, rows, _, dim = q.shape
    out = torch.full((batch, rows, min(top_k, slots.shape[1])), -1, dtype=torch.int64)
    for b in range(batch):
        for n in range(rows):
            scores = []
            for slot in slots[b, : int(visible[b, n])].tolist():
                products = (q[b, n].float() @ pool[slot].float()) * dim**-0.5
                scores.append(float((weights[b, n] * products.clamp(min=0)).sum()))
            order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
            best = sorted(order[:top_k])
            out[b, n, : len(best)] = slots[b, best]
    return out
