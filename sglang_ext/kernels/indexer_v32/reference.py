"""Naive selection: one row at a time, scores in float32, a plain sort."""

from __future__ import annotations

import torch
from torch import Tensor


def select_tokens_reference(
    q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """See `api.select_tokens`."""
    batch, rows, _, dim = q.shape
    out = torch.full((batch, rows, min(top_k, keys.shape[1])), -1, dtype=torch.int64)
    for b in range(batch):
        for n in range(rows):
            scores = []
            for j in range(int(visible[b, n])):
                products = (q[b, n].float() @ keys[b, j].float()) * dim**-0.5
                scores.append(float((weights[b, n] * products.clamp(min=0)).sum()))
            order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
            best = sorted(order[:top_k])
            out[b, n, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return out


def select_tokens_fp8_reference(
    q: tuple[Tensor, Tensor],
    weights: Tensor,
    keys: tuple[Tensor, Tensor],
    visible: Tensor,
    top_k: int,
) -> Tensor:
    """See `api.select_tokens_fp8`; bytes decoded one by one."""

    def decoded(codes: Tensor, scale: Tensor) -> Tensor:
        values = codes.view(torch.float8_e4m3fn).float()
        factors = scale.view(torch.float8_e8m0fnu).float()
        return values * factors.repeat_interleave(128, dim=-1)[..., : codes.shape[-1]]

    return select_tokens_reference(decoded(*q), weights, decoded(*keys), visible, top_k)
