"""Rotary position embedding on precomputed tables, half-split ("neox") pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def split_cache(cache: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, head_dim / 2], of a table that holds them side by side."""
    cos, sin = cache.chunk(2, dim=-1)
    return cos.contiguous(), sin.contiguous()


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] rotated by cos, sin [tokens, head_dim / 2].

    Pair i of a head is (x[i], x[i + head_dim / 2]); computed in the dtype of `x`.
    """
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
