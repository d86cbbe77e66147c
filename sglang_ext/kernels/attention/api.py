"""Checked entry to paged attention."""

from __future__ import annotations

import torch

from sglang_ext.kernels.attention.plan import AttentionPlan
from sglang_ext.kernels.attention.spec import AttentionSpec
from sglang_ext.kernels.attention.torch_paged import attend


def paged_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = softmax(scale * q K^T + mask) V over each request's pool slots.

    Args:
        q: [rows, query heads, dim], contiguous; at least `plan.total_rows` rows.
        k_buffer: [slots, key heads, dim], any float dtype; query heads % key heads == 0.
        v_buffer: [slots, key heads, value dim].
        plan: the forward's lengths and slots. New rows must already be in the buffers.
        spec: the layer.
        sinks: None or [query heads], logits that take part in the softmax and carry no value.

    Returns:
        [rows, query heads, value dim], dtype of q; rows beyond the plan and rows of requests
        without keys are zero. Slots outside the plan are never read, so they may hold NaN.

    Raises:
        ValueError: shapes that contradict each other, with expected and found.
    """
    _check(q, k_buffer, v_buffer, plan, sinks)
    return attend(q, k_buffer, v_buffer, plan, spec, sinks)


def _check(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    sinks: torch.Tensor | None,
) -> None:
    rows, heads, dim = q.shape
    if k_buffer.shape[-1] != dim or heads % k_buffer.shape[1]:
        raise ValueError(
            f"k_buffer: expected [slots, a divisor of {heads} heads, {dim}], "
            f"found {list(k_buffer.shape)}"
        )
    if v_buffer.shape[:2] != k_buffer.shape[:2]:
        raise ValueError(
            f"v_buffer: expected slots and heads of k_buffer {list(k_buffer.shape[:2])}, "
            f"found {list(v_buffer.shape)}"
        )
    if rows < plan.total_rows:
        raise ValueError(f"q: expected at least {plan.total_rows} planned rows, found {rows}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks: expected [{heads}], found {list(sinks.shape)}")
