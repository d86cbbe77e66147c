"""Checked entry to the clamped swiglu; the rule is in `core.router`."""

from __future__ import annotations

import math

from torch import Tensor

from sglang_ext.core import router as vectorised
from sglang_ext.kernels.choice import runs_triton


def clamped_swiglu(
    gate: Tensor, up: Tensor, limit: float, *, implementation: str = "auto"
) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit), rounded after each factor (DeepSeek-V4).

    Args:
        gate, up: [rows, width] float of one dtype, each with contiguous rows; they may be halves
            of one tensor. rows may be 0.
        limit: above 0.
        implementation: auto, torch or triton.

    Returns:
        [rows, width] in the dtype of gate.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit, or an implementation that cannot run.
    """
    op = "clamped_swiglu"
    if gate.dim() != 2 or not gate.is_floating_point():
        raise ValueError(
            f"{op}: gate: expected float [rows, width], found {gate.dtype} {list(gate.shape)}"
        )
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"{op}: up: expected {gate.dtype} {list(gate.shape)} as gate, found {up.dtype} "
            f"{list(up.shape)}"
        )
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"{op}: limit: expected a number above 0, found {limit}")
    if runs_triton(op, implementation, gate.device):
        from sglang_ext.kernels.swiglu.triton import clamped_swiglu_triton

        return clamped_swiglu_triton(_rows(gate), _rows(up), limit)
    return vectorised.clamped_swiglu(gate, up, limit)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
