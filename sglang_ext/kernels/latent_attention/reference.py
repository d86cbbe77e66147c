"""Naive float32 versions: one query row and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def _row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [dim], keys [tokens, dim], values [tokens, value] -> [value]."""
    return torch.softmax((keys.float() @ q.float()) * scale, dim=0) @ values.float()


def attend_visible_reference(
    q: Tensor, latents: Tensor, visible: Tensor, value_dim: int, scale: float
) -> Tensor:
    """See `api.attend_visible`; float32."""
    out = torch.zeros(*q.shape[:-1], value_dim)
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            seen = latents[b, : int(visible[b, n])]
            for head in range(q.shape[2] if len(seen) else 0):
                out[b, n, head] = _row(q[b, n, head], seen, seen[:, :value_dim], scale)
    return out


def attend_expanded_reference(
    q: Tensor, keys: Tensor, values: Tensor, first: int, scale: float
) -> Tensor:
    """See `api.attend_expanded`; float32."""
    out = torch.zeros(q.shape[0], q.shape[1], values.shape[-1])
    for n in range(q.shape[0]):
        end = first + n + 1
        for head in range(q.shape[1]):
            out[n, head] = _row(q[n, head], keys[:end, head], values[:end, head], scale)
    return out
