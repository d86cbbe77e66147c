"""Naive fp32 attention, one request and one query head at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.kernels.attention.spec import AttentionSpec


def reference_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    keys: Sequence[int],
    rows: Sequence[int],
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    stride: int = 1,
) -> torch.Tensor:
    """out[i] = sum_j softmax_j(cap(scale * q_i . k_j) + mask_ij) v_j.

    Shapes as in `api.paged_attention` and `plan.AttentionPlan`; returns fp32.
    """
    out = torch.zeros(q.shape[0], q.shape[1], v_buffer.shape[-1])
    share = q.shape[1] // k_buffer.shape[1]
    start = 0
    for request, (length, count) in enumerate(zip(keys, rows, strict=True)):
        own = slots[request, :length]
        visible = _visible(length, count, spec, None if tree is None else tree[request], stride)
        for head in range(q.shape[1] if length else 0):
            k = k_buffer[own, head // share].float() * spec.k_scale
            v = v_buffer[own, head // share].float() * spec.v_scale
            scores = q[start : start + count, head].float() @ k.T * spec.scale
            if spec.logit_cap > 0:
                scores = spec.logit_cap * torch.tanh(scores / spec.logit_cap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                sink = sinks[head].float().expand(count, 1)
                scores = torch.cat([scores, sink], 1)
            weights = torch.softmax(scores, -1)[:, :length]
            out[start : start + count, head] = weights @ v
        start += count
    return out


def _visible(
    length: int, count: int, spec: AttentionSpec, tree: torch.Tensor | None, stride: int
) -> torch.Tensor:
    """bool [count, length]."""
    prefix = length - count
    column = torch.arange(length)
    position = length - 1 - stride * torch.arange(count - 1, -1, -1)[:, None]
    if tree is None or not spec.causal:
        visible = (column <= position) | (not spec.causal)
        return visible & ((column >= position - spec.window) | (spec.window < 0))
    position = prefix + tree.sum(-1, keepdim=True) - 1
    visible = (column >= position - spec.window) | (spec.window < 0)
    visible[:, prefix:] = tree
    return visible
