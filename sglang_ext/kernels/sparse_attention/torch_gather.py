"""Shared-KV attention in torch: rows gathered chunk by chunk, float32 products."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.sparse_attention.rows import Rows

# Gathered rows of one chunk, in elements: 64 MiB of float32.
CHUNK_ELEMENTS = 1 << 24


def sparse_attention_torch(
    q: Tensor, parts: tuple[Rows, ...], sink: Tensor | None, scale: float
) -> Tensor:
    """See `api.sparse_attention`; arguments are taken as checked."""
    queries, heads, dim = q.shape
    out = q.new_empty(queries, heads, dim)
    width = sum(part.slots.shape[1] for part in parts)
    step = max(CHUNK_ELEMENTS // max(width * dim, 1), 1)
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        absent = torch.cat([part.slots[rows] < 0 for part in parts], dim=1)
        seen = torch.cat([p.buffer[p.slots[rows].clamp(min=0)].float() for p in parts], dim=1)
        # An unused row may hold anything, and 0 * NaN is NaN.
        seen.masked_fill_(absent.unsqueeze(-1), 0.0)
        scores = torch.bmm(q[rows].float(), seen.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(absent.unsqueeze(1), float("-inf"))
        out[rows] = torch.bmm(_weights(scores, sink), seen).to(q.dtype)
    return out


def _weights(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax of [queries, heads, n] with the sink in the denominator only."""
    if sink is None:
        return torch.softmax(scores, dim=-1).nan_to_num_(nan=0.0)
    extra = sink.float().view(1, -1, 1)
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), extra)
    weights = (scores - top).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True) + (extra - top).exp())
