"""Checked entry to the indexer's selection."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.indexer.torch_select import select_entries_torch


def select_entries(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    slots: Tensor,
    visible: Tensor,
    top_k: int,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Pool rows of the `top_k` visible entries with the highest index score.

    score[b, n, j] = sum_h weights[b, n, h] * ReLU(q[b, n, h] . pool[slots[b, j]] * dim^-1/2)

    Args:
        q: [batch, rows, heads, dim], index queries.
        weights: [batch, rows, heads] float32, may be negative.
        pool: [pool rows, dim], index keys; may hold anything where no row may look.
        slots: [batch, entries] int64, pool row of each entry; a valid row beyond what is visible.
        visible: [batch, rows] int64, number of leading entries that a row may see.
        top_k: at least 1.
        implementation: auto, torch or triton.

    Returns:
        [batch, rows, min(top_k, entries)] int64 pool rows in the entries' order, -1 where a row
        has fewer (behind the last when there was a choice). Equal scores: the earlier entry wins.

    Raises:
        ValueError: shapes that contradict each other, with expected and found; an
            implementation that cannot run.
    """
    batch, rows, heads, dim = q.shape
    _expect("weights", weights, (batch, rows, heads))
    _expect("pool", pool, (pool.shape[0], dim))
    _expect("slots", slots, (batch, slots.shape[1]))
    _expect("visible", visible, (batch, rows))
    if weights.dtype != torch.float32:
        raise ValueError(f"select_entries: weights: expected float32, found {weights.dtype}")
    if top_k < 1:
        raise ValueError(f"select_entries: top_k: expected at least 1, found {top_k}")
    if not runs_triton("select_entries", implementation, q.device):
        return select_entries_torch(q, weights, pool, slots, visible, top_k)
    from sglang_ext.kernels.indexer.triton import select_entries_triton

    pool, slots, visible = pool.contiguous(), slots.contiguous(), visible.contiguous()
    return select_entries_triton(q.contiguous(), weights.contiguous(), pool, slots, visible, top_k)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"select_entries: {name}: expected {list(shape)}, found {list(tensor.shape)}"
        )
