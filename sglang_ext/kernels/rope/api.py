"""Half-split ("neox") rotation as out = x * [c, c] + roll(x, dim / 2) * [-s, s]."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTables:
    """[c, c] and [-s, s] for every position, from a table [positions, dim] of [c, s] rows."""

    def __init__(self, cache: Tensor) -> None:
        cos, sin = cache.chunk(2, dim=-1)
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [rows] -> cos, sin, each [rows, 1, dim]."""
        cos = self.cos.index_select(0, positions).unsqueeze(1)
        return cos, self.sin.index_select(0, positions).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, dim], cos and sin as `RotaryTables.rows` gives them -> contiguous, same."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)
