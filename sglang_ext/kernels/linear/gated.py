"""silu(x G^T) * (x U^T): the two halves of a gated MLP's first product, weights stacked [G; U]."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.kernels.linear.api import PackedLinear, PlainLinear, can_pack


class Gated(Protocol):
    """x [rows, in] -> [rows, width]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class SplitGated:
    """One product over [G; U], packed or not, then the activation."""

    def __init__(self, product: PackedLinear | PlainLinear, width: int) -> None:
        self.product, self.width = product, width

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = torch.split(self.product(x), self.width, -1)
        return F.silu(gate).mul_(up)


class FusedGated:
    """Two packed products: the first ends in silu, the second multiplies by it as it is written."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        width = weight.shape[0] // 2
        self.gate = PackedLinear(weight[:width], None if bias is None else bias[:width])
        self.up = PackedLinear(weight[width:], None if bias is None else bias[width:])

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate, self.up
        activated = gate._call(x, gate.packed, gate.bias, "swish", [], "")
        return up._call_binary(x, activated, up.packed, up.bias, "mul")


def make_gated(weight: Tensor, bias: Tensor | None = None) -> Gated:
    """weight [2 * width, in], gate first."""
    if can_pack(weight):
        return FusedGated(weight, bias)
    return SplitGated(PlainLinear(weight, bias), weight.shape[0] // 2)
