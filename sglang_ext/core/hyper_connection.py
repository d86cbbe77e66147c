"""Manifold-constrained hyper-connections: n residual streams around every sublayer.

Source: mHC (Xie et al., 2025) as DeepSeek-V4 uses it. A sublayer F sees one mix of the n streams
X; its output is spread back over them while the streams are mixed among themselves:

    x  = sum_i pre_i X_i           y = F(norm(x))           X'_j = post_j y + sum_i C[i, j] X_i

pre, post and C come from the streams of the same token. C is nearly doubly stochastic, not
symmetric, and is summed over its FIRST axis, that is, used transposed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class HcMix(NamedTuple):
    """What a sublayer reads and how its output is spread.

    Attributes:
        x: [tokens, D] in the streams' dtype, input of the sublayer's norm.
        post: [tokens, n] float32, weight of the sublayer's output in each stream.
        comb: [tokens, n, n] float32, comb[t, i, j]: share of old stream i in new stream j.
    """

    x: Tensor
    post: Tensor
    comb: Tensor


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices exp(logits) scaled by rows and columns.

    One iteration normalises rows, then columns. The rows of the first iteration are a softmax to
    which eps is added; every later normalisation has eps in its divisor instead. The columns come
    last, so they sum to 1 more closely than the rows.

    Args:
        logits: [tokens, n, n].
        iters: at least 1.
        eps: keeps the divisors away from 0.

    Returns:
        [tokens, n, n] float32.
    """
    matrix = torch.softmax(logits.float(), dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def _project(streams: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """(fn x) * rsqrt(mean(x^2) + rms_eps), x the token's streams side by side.

    streams [tokens, n, D], fn [out, n * D] -> [tokens, out] float32. The root-mean-square is one
    number per token, so it may be applied after the product.
    """
    flat = streams.flatten(1).float()
    inverse = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + rms_eps)
    return F.linear(flat, fn) * inverse


def _collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights[t, i] streams[t, i], in float32; [tokens, n, D] -> [tokens, D]."""
    return torch.einsum("tn,tnd->td", weights, streams.float()).to(streams.dtype)


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
) -> HcMix:
    """Weights of one sublayer's hyper-connection, and its input.

    With m = (fn x) * rsqrt(mean(x^2) + rms_eps) split into m1 [n], m2 [n], m3 [n, n]:
        pre = sigmoid(scale_0 m1 + base_1) + eps       post = 2 sigmoid(scale_1 m2 + base_2)
        comb = sinkhorn(scale_2 m3 + base_3)

    Args:
        streams: [tokens, n, D]; tokens may be 0.
        fn: [n * (2 + n), n * D] float32.
        base: [n * (2 + n)] float32.
        scale: [3] float32, for pre, post and comb.
        iters, eps: of `sinkhorn`; eps is also added to pre.
        rms_eps: inside the root of the token's mean square.
    """
    tokens, n, _ = streams.shape
    pre, post, comb = _project(streams, fn, rms_eps).split([n, n, n * n], dim=-1)
    pre_base, post_base, comb_base = base.split([n, n, n * n])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = sinkhorn((comb * scale[2] + comb_base).view(tokens, n, n), iters, eps)
    return HcMix(_collapse(streams, pre), post, comb)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i comb[i, j] X_i, in float32.

    Args:
        y: [tokens, D], output of the sublayer.
        streams: [tokens, n, D], the streams that `hc_pre` was given.
        post: [tokens, n] float32.
        comb: [tokens, n, n] float32, summed over its FIRST stream axis.

    Returns:
        [tokens, n, D] in the streams' dtype.
    """
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    mixed += post.unsqueeze(-1) * y.float().unsqueeze(1)
    return mixed.to(streams.dtype)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, rms_eps: float
) -> Tensor:
    """The one hidden state that the model's final norm reads.

    h = sum_i w_i X_i with w = sigmoid(scale (fn x) * rsqrt(mean(x^2) + rms_eps) + base) + eps.

    Args:
        streams: [tokens, n, D].
        fn: [n, n * D] float32.
        base: [n] float32.
        scale: [1] float32.

    Returns:
        [tokens, D] in the streams' dtype, before the final norm.
    """
    weights = torch.sigmoid(_project(streams, fn, rms_eps) * scale + base) + eps
    return _collapse(streams, weights)
