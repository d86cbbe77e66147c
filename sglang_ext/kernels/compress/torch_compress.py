"""Pooling in torch: gather a chunk of blocks, pool, normalise, rotate."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.compress import finish, pool

# Gathered rows of one chunk, in elements: 64 MiB of float32.
CHUNK_ELEMENTS = 1 << 24


def compress_blocks_torch(
    raw: Tensor, members: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, ratio: int
) -> Tensor:
    """See `api.compress_blocks`; arguments are taken as checked."""
    out = torch.empty(members.shape[0], weight.shape[0], device=raw.device)
    step = max(CHUNK_ELEMENTS // (members.shape[1] * raw.shape[1]), 1)
    for start in range(0, members.shape[0], step):
        part = slice(start, start + step)
        present = members[part] >= 0
        pooled = pool(raw[members[part].clamp(min=0)], present, ratio)
        out[part] = finish(pooled, weight, eps, cos[part], sin[part])
    return out
