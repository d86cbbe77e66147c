"""Naive float32 version: one block and one channel at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def compress_blocks_reference(
    raw: Tensor, members: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, ratio: int
) -> Tensor:
    """See `api.compress_blocks`."""
    series, dim = members.shape[1] // ratio, weight.shape[0]
    out = torch.zeros(members.shape[0], dim)
    for block, slots in enumerate(members.tolist()):
        pooled = []
        for channel in range(dim):
            gates, values = [], []
            for place, slot in enumerate(slots):
                if slot < 0:
                    continue
                column = channel + (place // ratio) * dim
                values.append(float(raw[slot, column]))
                gates.append(float(raw[slot, series * dim + column]))
            top = max(gates)
            weights = [math.exp(g - top) for g in gates]
            pooled.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        scale = (sum(p * p for p in pooled) / dim + eps) ** -0.5
        normed = [p * scale * float(w) for p, w in zip(pooled, weight, strict=True)]
        start = dim - 2 * cos.shape[1]
        for pair in range(cos.shape[1]):
            even, odd = normed[start + 2 * pair], normed[start + 2 * pair + 1]
            c, s = float(cos[block, pair]), float(sin[block, pair])
            normed[start + 2 * pair] = even * c - odd * s
            normed[start + 2 * pair + 1] = odd * c + even * s
        out[block] = torch.tensor(normed)
    return out
