"""Naive float32 version: one query and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.sparse_attention.rows import Rows


def sparse_attention_reference(
    q: Tensor, sources: tuple[Rows, ...], sink: Tensor | None, scale: float, value_dim: int
) -> Tensor:
    """See `api.sparse_attention`; float32."""
    out = torch.zeros(q.shape[0], q.shape[1], value_dim)
    for row in range(q.shape[0]):
        parts = [s.pool[s.index[row][s.index[row] >= 0]].float() for s in sources]
        seen = torch.cat(parts)
        for head in range(q.shape[1] if len(seen) else 0):
            logits = (seen @ q[row, head].float()) * scale
            if sink is not None:
                logits = torch.cat((logits, sink[head].float().view(1)))
            weights = torch.softmax(logits, dim=0)[: len(seen)]
            out[row, head] = weights @ seen[:, :value_dim]
    return out
