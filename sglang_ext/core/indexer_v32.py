"""The lightning indexer of DeepSeek-V3.2: which cached tokens a query may attend to.

    q_h   = rope(wq_b c_q)                             one vector per index head
    k     = rope(LayerNorm(wk x))                      one vector per token, shared by the heads
    w_h   = (weights_proj x)_h * heads^-1/2            in float32
    score = sum_h w_h * ReLU(q_h . k * dim^-1/2)
The rotation covers the FIRST dimensions of a vector and pairs i with i + half ("half-split").
DeepSeek-V4's indexer rotates the last dimensions in interleaved pairs; the two share no code.

The published kernels turn q and k by a Hadamard matrix before they round both to fp8. The matrix
is orthogonal, so without the rounding the turn changes no score as long as BOTH sides get it.
`Precision.EXACT` does neither; `Precision.FP8` does both.

Equal scores: the earliest token wins, on every device and for every number of tokens.
Source: DeepSeek-V3.2-Exp report, section 2.1, and its inference code.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.core.quant import act_quant, dequantise_fp8
from sglang_ext.core.rope import rotate_half_split

LAYER_NORM_EPS = 1e-6


class Precision(StrEnum):
    """What index vectors are rounded to."""

    EXACT = "exact"
    FP8 = "fp8"


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * half dimensions, half-split pairs.

    x [tokens, heads, dim]; cos, sin [tokens, half] -> the same shape as x.
    """
    width = 2 * cos.shape[-1]
    turned = rotate_half_split(x[..., :width], cos, sin)
    return torch.cat((turned, x[..., width:]), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """x H with H the orthonormal Sylvester-Hadamard matrix; the last axis is a power of two.

    Raises:
        ValueError: another width.
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"hadamard: expected a power of two as last axis, found {width}")
    out, half = x, 1
    while half < width:
        first, second = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return out * width**-0.5


def rounded(x: Tensor, precision: Precision) -> Tensor:
    """Index vectors as the scores see them; [..., dim], dtype kept.

    FP8: Hadamard turn, then e4m3 with one power-of-two scale per 128 dimensions. The values fit
    bfloat16 exactly, so what is kept in a cache is what was scored.
    """
    if precision is Precision.EXACT:
        return x
    turned = hadamard(x.float()).flatten(0, -2)
    codes, scale = act_quant(turned, block=min(128, turned.shape[-1]))
    block = (1, min(128, turned.shape[-1]))
    return dequantise_fp8(codes, scale, block=block).view(x.shape).to(x.dtype)


def index_query(
    q: Tensor, cos: Tensor, sin: Tensor, precision: Precision = Precision.EXACT
) -> Tensor:
    """[tokens, heads, dim] projections -> index queries of the same shape."""
    return rounded(rotate_first(q, cos, sin), precision)


def index_key(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    precision: Precision = Precision.EXACT,
) -> Tensor:
    """[tokens, dim] projections -> index keys of the same shape and dtype.

    weight, bias: [dim] of the LayerNorm, which is taken in float32.
    """
    shape = (k.shape[-1],)
    normed = F.layer_norm(k.float(), shape, weight.float(), bias.float(), LAYER_NORM_EPS)
    turned = rotate_first(normed.to(k.dtype).unsqueeze(1), cos, sin).squeeze(1)
    return rounded(turned, precision)


def head_weights(projected: Tensor) -> Tensor:
    """[tokens, heads] float32 projections -> weights of the heads' scores."""
    return projected.float() * projected.shape[-1] ** -0.5


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """score[b, n, j] = sum_h weights[b, n, h] * ReLU(q[b, n, h] . keys[b, j] * dim^-1/2).

    q [batch, rows, heads, dim], weights [batch, rows, heads] float32, keys [batch, tokens, dim]
    -> [batch, rows, tokens] float32.
    """
    batch, rows, heads, dim = q.shape
    products = torch.bmm(q.float().view(batch, rows * heads, dim), keys.float().transpose(1, 2))
    products = products.mul_(dim**-0.5).relu_().view(batch * rows, heads, -1)
    summed = torch.bmm(weights.reshape(batch * rows, 1, heads), products)
    return summed.view(batch, rows, -1)


def choose(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Which tokens each row attends to: its `top_k` best visible ones, all if there are fewer.

    scores [..., tokens] float; entries that are not visible may hold anything, NaN included.
    visible [...] int, number of leading tokens a row may see.

    Returns:
        [..., tokens] bool.
    """
    column = torch.arange(scores.shape[-1], device=scores.device)
    seen = column < visible.unsqueeze(-1)
    if scores.shape[-1] <= top_k:
        return seen
    known = scores.masked_fill(~seen, float("-inf"))
    last = known.topk(top_k, dim=-1).values[..., -1:]
    above, level = known > last, known == last
    room = top_k - above.sum(dim=-1, keepdim=True)
    return (above | (level & (level.cumsum(dim=-1) <= room))) & seen


def positions_of(chosen: Tensor, width: int) -> Tensor:
    """Positions of the True entries in ascending order, -1 after the last.

    chosen [rows, tokens] bool with at most `width` True per row -> [rows, width] int64.
    """
    out = chosen.new_full((chosen.shape[0], width), -1, dtype=torch.int64)
    row, token = chosen.nonzero(as_tuple=True)
    place = chosen.cumsum(dim=-1)[row, token] - 1
    out[row, place] = token
    return out
