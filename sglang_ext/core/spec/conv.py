"""DFlash 2's block convolution: rows of a block see the rows just before them.

    out_t = sum_{tap < K} (base[tap] + delta_t[tap, group]) * x_{t-tap},   x before the block = 0

Depthwise, causal, along the block only; the coefficients of a row are predicted from that row.
Context rows take no part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def block_conv_reference(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """One row and one tap at a time; shapes as `block_conv`."""
    group = x.shape[-1] // delta.shape[-1]
    out = torch.zeros_like(x)
    for row in range(x.shape[1]):
        for tap in range(min(base.shape[0], row + 1)):
            weight = base[tap] + delta[:, row, tap].repeat_interleave(group, dim=-1)
            out[:, row] += weight * x[:, row - tap]
    return out


def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Convolves every block.

    x: [R, B, H], base: [K, H], delta: [R, B, K, H / group]  ->  [R, B, H]
    """
    blocks, rows, hidden = x.shape
    taps, groups = base.shape[0], delta.shape[-1]
    weight = (base.view(taps, groups, -1) + delta[..., None]).view(blocks, rows, taps, hidden)
    out = weight[:, :, 0] * x
    for tap in range(1, min(taps, rows)):
        out[:, tap:].addcmul_(weight[:, tap:, tap], x[:, :-tap])
    return out


class BlockConv(nn.Module):
    """The convolutions before and after one sublayer, both predicted from its normed input.

    base_kernel: [2, K, H], 0 before the sublayer and 1 after it, identity at initialisation
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        if hidden_size % group_size:
            raise ValueError(
                f"conv_group_size: expected a divisor of hidden_size {hidden_size}, found "
                f"{group_size}; correct dflash_config in the draft's config.json"
            )
        self.taps = kernel_size
        self.groups = hidden_size // group_size
        base = torch.zeros(2, kernel_size, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.groups, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolves the sublayer's input [R, B, H]; also returns the deltas for `after`."""
        deltas = F.linear(x, self.kernel_projection.weight)
        deltas = deltas.view(*x.shape[:2], 2, self.taps, self.groups)
        return block_conv(x, self.base_kernel[0], deltas[:, :, 0]), deltas[:, :, 1]

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        """Convolves the sublayer's output [R, B, H]."""
        return block_conv(x, self.base_kernel[1], delta)
