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


def rotate_trailing_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """The last `rope` dims of every head rotated, neighbours as pairs (DeepSeek-V4).

    Pair i is (x[nope + 2i], x[nope + 2i + 1]), nope = head_dim - rope. The leading dims pass
    through. Not the convention of `rotate_half_split`, whose pairs are half a head apart.

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, rope / 2].
        inverse: rotate by the negative angle, which undoes the rotation at the same position.

    Returns:
        [tokens, heads, head_dim] in the dtype of `x`, the rotation computed in float32.
    """
    rope = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    if inverse:
        sin = -sin
    plain = x.shape[-1] - rope
    even, odd = x[..., plain:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :plain], rotated.to(x.dtype)), dim=-1)
