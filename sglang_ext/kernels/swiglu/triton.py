"""The clamped swiglu in Triton: one pass over two inputs."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.kernels.launch import cdiv, launch

_BLOCK = 1024


@triton.jit
def _clamped_swiglu(
    gate,  # [rows, width], rows gate_stride apart
    up,  # [rows, width], rows up_stride apart
    out,  # [rows, width]
    width,
    gate_stride,
    up_stride,
    limit,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32)
    # Comparisons instead of minimum and maximum: they let NaN through.
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    # The product is taken of rounded factors, as a framework's two operations do.
    silu = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * u).to(out.dtype.element_ty), inside)


def clamped_swiglu_triton(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """gate, up [rows, width] with contiguous rows -> [rows, width]."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    grid = (rows, cdiv(width, _BLOCK))
    strides = (gate.stride(0), up.stride(0))
    launch(_clamped_swiglu, grid, gate, up, out, width, *strides, float(limit), BLOCK=_BLOCK)
    return out
