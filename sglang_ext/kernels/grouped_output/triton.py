"""Grouped output projection in Triton: the rotation happens while the tile is loaded.

A tile of the inner axis lies wholly in the plain part of a head or wholly in its rotated part. In
the rotated part the neighbour of every element is loaded too (the same cache lines) and combined
before the product, so the unrotated output never exists in memory.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.kernels.launch import cdiv, launch

# Tokens, ranks and inner elements of a tile, and pipeline stages. Exact float32 products do not
# run on tensor cores and hold their operands in registers, so their tiles are smaller.
_TILES = (32, 64, 64, 3)
_FLOAT32_TILES = (16, 32, 16, 2)


@triton.jit
def _grouped_output(
    o,  # [tokens, groups * inner]
    cos,  # [tokens, rope / 2]
    sin,
    weight,  # [groups, rank, inner]
    out,  # [tokens, groups * rank]
    tokens,
    groups,
    rank,
    inner,  # heads of a group * head_dim
    head_dim,
    nope,  # plain dims of a head
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group = tl.program_id(2)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    live = (t < tokens)[:, None]
    row = o + t[:, None] * (groups * inner) + group * inner
    # The neighbour enters with +sin at even places and with -sin at odd ones.
    sign = tl.where(k % 2 == 0, 1.0, -1.0)
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    matrix = weight + (group.to(tl.int64) * rank + r[None, :]) * inner
    for head in range(0, inner, head_dim):
        for start in range(head, head + nope, BLOCK_K):
            x = tl.load(row + (start + k)[None, :], live, 0.0)
            w = tl.load(matrix + (start + k)[:, None], (r < rank)[None, :], 0.0)
            total += tl.dot(x, w, input_precision="ieee")
        for start in range(head + nope, head + head_dim, BLOCK_K):
            x = tl.load(row + (start + k)[None, :], live, 0.0).to(tl.float32)
            neighbour = tl.load(row + ((start + k) ^ 1)[None, :], live, 0.0).to(tl.float32)
            pair = (start - head - nope + k) // 2
            at = t[:, None] * ((head_dim - nope) // 2) + pair[None, :]
            c = tl.load(cos + at, live, 0.0).to(tl.float32)
            s = tl.load(sin + at, live, 0.0).to(tl.float32)
            rotated = (x * c + neighbour * s * sign[None, :]).to(o.dtype.element_ty)
            w = tl.load(matrix + (start + k)[:, None], (r < rank)[None, :], 0.0)
            total += tl.dot(rotated, w, input_precision="ieee")
    target = out + t[:, None] * (groups * rank) + group * rank + r[None, :]
    tl.store(target, total.to(out.dtype.element_ty), live & (r < rank)[None, :])


def grouped_output_triton(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    """See `api.grouped_output`; contiguous arguments."""
    tokens, _, dim = o.shape
    groups, rank, inner = weight.shape
    rope = 2 * cos.shape[1]
    out = o.new_empty(tokens, groups * rank)
    block_t, block_r, block_k, stages = _FLOAT32_TILES if o.dtype == torch.float32 else _TILES
    launch(
        _grouped_output, (cdiv(tokens, block_t), cdiv(rank, block_r), groups),
        o, cos, sin, weight, out, tokens, groups, rank, inner, dim, dim - rope,
        BLOCK_T=block_t, BLOCK_R=block_r, BLOCK_K=math.gcd(dim - rope, rope, block_k),
        num_stages=stages,
    )  # fmt: skip
    return out
