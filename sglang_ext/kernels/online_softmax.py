"""Softmax over keys that arrive in tiles, for Triton kernels (imports Triton; not for api files).

Source: Online normalizer calculation for softmax (Milakov and Gimelshein, 2018), as used by
FlashAttention.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_step(q, k, v, visible, scale, total, top, norm):
    """Take one tile of keys into the running sums of a tile of query heads.

    q [H, D], k [D, K], v [K, V], visible bool [K]; total [H, V], top [H] and norm [H] float32 are
    the weighted values, the largest score and the sum of weights so far. Products of float32 are
    exact ("ieee"), not tf32.
    """
    scores = tl.dot(q, k, input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # Before the first visible key everything is -inf; subtracting 0 keeps NaN away.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(scores - anchor[:, None])
    fade = tl.exp(top - anchor)
    total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return total, new_top, norm * fade + tl.sum(p, axis=1)
