"""Softmax over keys that arrive in tiles, for Triton kernels (imports Triton; not for api files).

Source: Online normalizer calculation for softmax (Milakov and Gimelshein, 2018), as used by
FlashAttention.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(base, row, live, dim, offset, width, COLUMNS: tl.constexpr):
    """Columns offset .. offset + width of rows of `dim`, padded to COLUMNS."""
    c = tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * dim + offset + c[None, :]
    return tl.load(base + at, live[:, None] & (c < width)[None, :], 0.0)


@triton.jit
def weigh(scores, seen, total, top, norm):
    """Weights [H, K] of a tile of scores, and the running sums, faded, that they are added to.

    seen: bool, broadcasts to scores. The weighted values of the tile itself are the caller's to add
    to total: a product over a row may have several parts.
    """
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # Before the first visible key everything is -inf; subtracting 0 keeps NaN away.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(scores - anchor[:, None])
    fade = tl.exp(top - anchor)
    return p, total * fade[:, None], new_top, norm * fade + tl.sum(p, axis=1)


@triton.jit
def softmax_step(q, k, v, visible, scale, total, top, norm):
    """Take one tile of keys into the running sums of a tile of query heads.

    q [H, D], k [D, K], v [K, V], visible bool [K]; total [H, V], top [H] and norm [H] float32 are
    the weighted values, the largest score and the sum of weights so far. Products of float32 are
    exact ("ieee"), not tf32.
    """
    scores = tl.dot(q, k, input_precision="ieee") * scale
    p, total, top, norm = weigh(scores, visible[None, :], total, top, norm)
    return total + tl.dot(p.to(v.dtype), v, input_precision="ieee"), top, norm
