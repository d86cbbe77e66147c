"""Checked entry to the choice of the best entries."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.top_k.torch_top_k import best_entries_torch


def best_entries(
    scores: Tensor, values: Tensor, visible: Tensor, top_k: int, *, implementation: str = "auto"
) -> Tensor:
    """Values of each row's `top_k` visible entries with the highest scores, in the entries' order.

    Args:
        scores: [batch, rows, entries] float32; what is not visible may hold anything, NaN included.
        values: [batch, entries] int64.
        visible: [batch, rows] int64, number of leading entries that a row may choose among.
        top_k: at least 1.
        implementation: auto, torch or triton.

    Returns:
        [batch, rows, min(top_k, entries)] int64, -1 after the last. Equal scores: the earlier
        entry wins; 0.0 and -0.0 are equal.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an implementation that cannot run.
    """
    op = "best_entries"
    if scores.dim() != 3 or scores.dtype != torch.float32:
        raise ValueError(
            f"{op}: scores: expected float32 [batch, rows, entries], found {scores.dtype} "
            f"{list(scores.shape)}"
        )
    batch, rows, entries = scores.shape
    for name, tensor, shape in (
        ("values", values, [batch, entries]),
        ("visible", visible, [batch, rows]),
    ):
        if list(tensor.shape) != shape or tensor.dtype != torch.int64:
            raise ValueError(
                f"{op}: {name}: expected int64 {shape}, found {tensor.dtype} {list(tensor.shape)}"
            )
    if top_k < 1:
        raise ValueError(f"{op}: top_k: expected at least 1, found {top_k}")
    if runs_triton(op, implementation, scores.device):
        from sglang_ext.kernels.top_k.triton import best_entries_triton

        arguments = (scores.contiguous(), values.contiguous(), visible.contiguous())
        return best_entries_triton(*arguments, top_k)
    return best_entries_torch(scores, values, visible, top_k)
