"""Sparse attention in torch, in float32 over gathered rows, a chunk of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.sparse_attention.rows import Rows

# Gathered rows of one chunk, in elements: 16 MiB of float32, which stays near the caches.
CHUNK_ELEMENTS = 1 << 22


def sparse_attention_torch(
    q: Tensor, sources: tuple[Rows, ...], sink: Tensor | None, scale: float, value_dim: int
) -> Tensor:
    """See `api.sparse_attention`; arguments are taken as checked."""
    queries, heads, dim = q.shape
    out = q.new_empty(queries, heads, value_dim)
    width = sum(source.index.shape[1] for source in sources)
    step = max(CHUNK_ELEMENTS // max(width * dim, 1), 1)
    for start in range(0, queries, step):
        part = slice(start, start + step)
        out[part] = _attend(q[part], _gather(sources, part), sink, scale, value_dim).to(q.dtype)
    return out


def _gather(sources: tuple[Rows, ...], part: slice) -> tuple[Tensor, Tensor]:
    """(rows [queries, width, dim] float32, absent [queries, width] bool) of some queries."""
    index = torch.cat([source.index[part] for source in sources], dim=1)
    absent = index < 0
    rows = [pool[own[part].clamp(min=0)] for pool, own in sources]
    # A row that is absent may hold anything, and 0 * NaN is NaN.
    return torch.cat(rows, dim=1).float().masked_fill_(absent.unsqueeze(-1), 0.0), absent


def _attend(
    q: Tensor, gathered: tuple[Tensor, Tensor], sink: Tensor | None, scale: float, value_dim: int
) -> Tensor:
    seen, absent = gathered
    scores = torch.bmm(q.float(), seen.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(absent.unsqueeze(1), float("-inf"))
    if sink is not None:
        column = sink.float().view(1, -1, 1).expand(scores.shape[0], -1, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num_(nan=0.0)
    return torch.bmm(weights[..., : seen.shape[1]], seen[..., :value_dim])
