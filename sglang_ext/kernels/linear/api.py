"""y = x W^T + b, with an optional addend, over a weight that does not change between calls.

F.linear hands oneDNN a row-major bf16 weight, which it must re-arrange for its tiles in every call.
Packed once, a product of few rows costs little more than reading the weight. In fp32 nothing is
gained, and `PlainLinear` gives F.linear's own bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x [rows, in] -> [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, addend: Tensor) -> Tensor:
        """x W^T + b + addend, addend [rows, out]."""
        ...


class PlainLinear:
    """F.linear on the tensors given; holds no copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, addend: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(addend)


class PackedLinear:
    """A copy of the weight in oneDNN's blocked layout; sums and addend in fp32, rounded once.

    Up to 32 rows, a row's result does not depend on how many rows are multiplied with it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._call_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._call(x, self.packed, self.bias, "none", [], "")

    def plus(self, x: Tensor, addend: Tensor) -> Tensor:
        return self._call_binary(x, addend, self.packed, self.bias, "add")


@lru_cache(maxsize=1)
def packing_works() -> bool:
    """Whether this torch build and processor pack bf16 weights; asked of the real operators."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x, w = torch.ones(1, 32, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.bfloat16)
        layer = PackedLinear(w)
        return bool((layer(x) == 32).all()) and bool((layer.plus(x, layer(x)) == 64).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def can_pack(weight: Tensor) -> bool:
    """Whether packing this weight is possible here and pays: a bf16 matrix on the CPU."""
    return (
        weight.dim() == 2
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and min(weight.shape) > 0
        and packing_works()
    )


def make_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    """The faster of the two for this weight."""
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)
