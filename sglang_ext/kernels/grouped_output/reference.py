"""Grouped output projection one token, group and output at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_output_reference(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    """Shapes as `api.grouped_output`; float32."""
    tokens, heads, dim = o.shape
    groups, rank, _ = weight.shape
    pairs = cos.shape[1]
    unrotated = o.float().clone()
    for t in range(tokens):
        for pair in range(pairs):
            even, odd = dim - 2 * pairs + 2 * pair, dim - 2 * pairs + 2 * pair + 1
            c, s = cos[t, pair].float(), sin[t, pair].float()
            # (even + i odd) * (c - i s): multiplication by the conjugate.
            unrotated[t, :, even] = o[t, :, even].float() * c + o[t, :, odd].float() * s
            unrotated[t, :, odd] = o[t, :, odd].float() * c - o[t, :, even].float() * s
    out = torch.zeros(tokens, groups * rank)
    share = heads // groups
    for t in range(tokens):
        for group in range(groups):
            flat = unrotated[t, group * share : (group + 1) * share].reshape(-1)
            for row in range(rank):
                out[t, group * rank + row] = (weight[group, row].float() * flat).sum()
    return out
