"""y = x / sqrt(mean(x^2) + eps) * weight, over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor

# With more rows the arithmetic itself costs more than starting seven kernels.
_FEW_ROWS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] of the same dtype; computed in fp32, rounded once."""
    return torch.rms_norm(x, weight.shape, weight, eps)


class RmsNorm:
    """rms_norm with a weight that does not change, x [rows, width].

    In bf16 few rows go through one fused kernel where torch.rms_norm starts seven on a CPU: the
    layer norm of [x, -x] subtracts a mean of 0 and divides by sqrt(mean(x^2) + eps). fp32 keeps
    the bits of torch.rms_norm.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.width = weight.shape[0]
        self._pair = torch.cat((weight, weight))
        self._few_rows = 0 if weight.dtype == torch.float32 else _FEW_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self._few_rows:
            return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
        pair = torch.cat((x, x.neg()), -1)
        out = torch.native_layer_norm(pair, self._pair.shape, self._pair, None, self.eps)[0]
        return out[:, : self.width].contiguous()
