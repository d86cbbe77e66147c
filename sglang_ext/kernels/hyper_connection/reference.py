"""Hyper-connections one token and one stream at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.hyper_connection import HcMix


def _mixes(token: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """token [n, D] -> [out]: every row of fn times the flat token, over its root mean square."""
    flat = token.reshape(-1).float()
    root = ((flat * flat).sum() / flat.numel() + rms_eps).sqrt()
    return torch.stack([(row * flat).sum() / root for row in fn.float()])


def sinkhorn_reference(logits: Tensor, iters: int, eps: float) -> Tensor:
    """One matrix [n, n]; rows of exp(logits) sum to 1, then alternate columns and rows."""
    n = logits.shape[0]
    matrix = torch.empty(n, n)
    for row in range(n):
        exponentials = torch.exp(logits[row].float() - logits[row].float().max())
        matrix[row] = exponentials / exponentials.sum() + eps
    for iteration in range(iters):
        if iteration > 0:
            for row in range(n):
                matrix[row] = matrix[row] / (matrix[row].sum() + eps)
        for column in range(n):
            matrix[:, column] = matrix[:, column] / (matrix[:, column].sum() + eps)
    return matrix


def hc_pre_reference(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
) -> HcMix:
    """Shapes as `api.hc_pre`; every result float32."""
    tokens, n, width = streams.shape
    x, post, comb = torch.zeros(tokens, width), torch.zeros(tokens, n), torch.zeros(tokens, n, n)
    for t in range(tokens):
        mixes = _mixes(streams[t], fn, rms_eps)
        for i in range(n):
            pre = torch.sigmoid(scale[0] * mixes[i] + base[i]) + eps
            x[t] += pre * streams[t, i].float()
            post[t, i] = 2 * torch.sigmoid(scale[1] * mixes[n + i] + base[n + i])
        logits = (scale[2] * mixes[2 * n :] + base[2 * n :]).reshape(n, n)
        comb[t] = sinkhorn_reference(logits, iters, eps)
    return HcMix(x, post, comb)


def hc_post_reference(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Shapes as `api.hc_post`; float32."""
    tokens, n, width = streams.shape
    out = torch.zeros(tokens, n, width)
    for t in range(tokens):
        for new in range(n):
            out[t, new] = post[t, new] * y[t].float()
            for old in range(n):
                out[t, new] += comb[t, old, new] * streams[t, old].float()
    return out


def hc_head_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, rms_eps: float
) -> Tensor:
    """Shapes as `api.hc_head`; float32."""
    tokens, n, width = streams.shape
    out = torch.zeros(tokens, width)
    for t in range(tokens):
        mixes = _mixes(streams[t], fn, rms_eps)
        for i in range(n):
            weight = torch.sigmoid(scale[0] * mixes[i] + base[i]) + eps
            out[t] += weight * streams[t, i].float()
    return out
