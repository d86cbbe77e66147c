"""Pooling in Triton: one program per block, norm and rotation before the only store.

Rows arrive in tiles and are pooled by a running softmax of every channel on its own. Whether a
row counts by series a or b is decided by its place in the block, so the same loop serves
overlapping and plain blocks.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.compress import series_of
from sglang_ext.kernels.launch import launch, next_power_of_2

_ROWS = 8


@triton.jit
def _compress(
    raw,  # [pool rows, 2 * SERIES * dim] float32: kv of each series, then gates
    members,  # [blocks, SERIES * RATIO] int64, -1 for none
    weight,  # [dim]
    cos,  # [blocks, rope / 2]
    sin,
    out,  # [blocks, dim] float32
    dim,
    pairs,  # rope / 2
    eps,
    SERIES: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, DIM)
    inside = (c < dim)[None, :]
    total = tl.zeros((DIM,), dtype=tl.float32)
    norm = tl.zeros((DIM,), dtype=tl.float32)
    top = tl.full((DIM,), float("-inf"), tl.float32)
    for start in range(0, SERIES * RATIO, ROWS):
        place = start + tl.arange(0, ROWS)
        slot = tl.load(members + block * SERIES * RATIO + place, place < SERIES * RATIO, -1)
        live = (slot >= 0)[:, None] & inside
        base = slot.to(tl.int64) * (2 * SERIES * dim) + (place // RATIO) * dim
        kv = tl.load(raw + base[:, None] + c[None, :], live, 0.0)
        gate = tl.load(raw + base[:, None] + SERIES * dim + c[None, :], live, float("-inf"))
        new_top = tl.maximum(top, tl.max(gate, axis=0))
        # Block 0 has no rows of series a: all is -inf until its own rows come.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(gate - anchor[None, :])
        fade = tl.exp(top - anchor)
        total = total * fade + tl.sum(p * kv, axis=0)
        norm = norm * fade + tl.sum(p, axis=0)
        top = new_top
    pooled = tl.where(c < dim, total / norm, 0.0)
    square = tl.div_rn(tl.sum(pooled * pooled, axis=0), dim.to(tl.float32))
    normed = pooled / tl.sqrt_rn(square + eps) * tl.load(weight + c, c < dim, 0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(normed, (DIM // 2, 2)))
    # Pairs of the plain part turn by angle 0.
    pair = tl.arange(0, DIM // 2) - (dim // 2 - pairs)
    turned = (pair >= 0) & (pair < pairs)
    cosine = tl.load(cos + block * pairs + pair, turned, 1.0).to(tl.float32)
    sine = tl.load(sin + block * pairs + pair, turned, 0.0).to(tl.float32)
    both = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    tl.store(out + block * dim + c, tl.reshape(both, (DIM,)), c < dim)


def compress_blocks_triton(
    raw: Tensor, members: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, ratio: int
) -> Tensor:
    """See `api.compress_blocks`; contiguous arguments, dim even."""
    blocks, dim = members.shape[0], weight.shape[0]
    out = torch.empty(blocks, dim, dtype=torch.float32, device=raw.device)
    launch(
        _compress, (blocks,), raw, members, weight, cos, sin, out, dim, cos.shape[1], eps,
        SERIES=series_of(ratio), RATIO=ratio, ROWS=_ROWS, DIM=max(2, next_power_of_2(dim)),
    )  # fmt: skip
    return out
