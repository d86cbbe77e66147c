"""Index vectors in Triton: norm, rotation, Hadamard turn and rounding in one pass.

A dim and the one that it turns with are both read from memory, so no value has to travel between
threads before the Hadamard turn. Results are rounded where a framework's operations round.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.indexer_v32 import LAYER_NORM_EPS, Precision
from sglang_ext.core.quant import ACT_AMAX_MIN, FP8_BLOCK
from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.quant.triton import e4m3_to_float, float_to_e4m3, power_of_two_scale

_ROWS = 16


@triton.jit
def _index_vectors(
    x,  # [rows, dim], `heads` rows of a token each
    weight,  # [dim], of the norm; read with NORM
    bias,
    cos,  # [tokens, half]
    sin,
    out,  # [rows, dim]
    rows,
    heads,
    dim,
    half,
    eps,
    amax_min,
    root,  # dim^-1/2
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    LEVELS: tl.constexpr,  # log2(dim)
    BLOCKS: tl.constexpr,  # scales of a vector
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    inside = (r < rows)[:, None] & (d < dim)[None, :]
    turned = d < 2 * half
    mate = tl.where(turned, tl.where(d < half, d + half, d - half), d)
    value = tl.load(x + r[:, None] * dim + d[None, :], inside, 0.0).to(tl.float32)
    other = tl.load(x + r[:, None] * dim + mate[None, :], inside, 0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if NORM:
        width = dim.to(tl.float32)
        mean = tl.div_rn(tl.sum(value, axis=1), width)
        centred = tl.where(inside, value - mean[:, None], 0.0)
        spread = tl.div_rn(tl.sum(centred * centred, axis=1), width)
        scale = tl.div_rn(1.0, tl.sqrt_rn(spread + eps))
        w = tl.load(weight + d, d < dim, 0.0).to(tl.float32)
        b = tl.load(bias + d, d < dim, 0.0).to(tl.float32)
        value = (centred * scale[:, None] * w[None, :] + b[None, :]).to(kind).to(tl.float32)
        w = tl.load(weight + mate, d < dim, 0.0).to(tl.float32)
        b = tl.load(bias + mate, d < dim, 0.0).to(tl.float32)
        other = (other - mean[:, None]) * scale[:, None] * w[None, :] + b[None, :]
        other = other.to(kind).to(tl.float32)
    angle = (r // heads)[:, None] * half + tl.where(d < half, d, d - half)[None, :]
    known = (r < rows)[:, None] & turned[None, :]
    c = tl.load(cos + angle, known, 1.0).to(kind).to(tl.float32)
    s = tl.load(sin + angle, known, 0.0).to(kind).to(tl.float32)
    straight = (value * c).to(kind).to(tl.float32)
    across = (other * s).to(kind).to(tl.float32)
    rotated = tl.where((d < half)[None, :], straight - across, straight + across)
    value = tl.where(turned[None, :], rotated.to(kind).to(tl.float32), value)
    if FP8:
        for level in tl.static_range(LEVELS):
            # Elements that differ in one bit of their index: their sum, and their difference.
            pairs = tl.reshape(value, (ROWS, DIM // (2 << level), 2, 1 << level))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            both = tl.join(first + second, first - second)
            value = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (ROWS, DIM))
        blocks = tl.reshape(value * root, (ROWS, BLOCKS, DIM // BLOCKS))
        amax = tl.maximum(tl.max(tl.abs(blocks), axis=2), amax_min)
        exponent, inverse = power_of_two_scale(amax)
        codes = float_to_e4m3(blocks * inverse[:, :, None])
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        value = tl.reshape(e4m3_to_float(codes) * factor[:, :, None], (ROWS, DIM))
    tl.store(out + r[:, None] * dim + d[None, :], value.to(kind), inside)


@triton.jit
def _trailing_pairs(
    x,  # [rows, dim], `heads` rows of a token each
    cos,  # [tokens, half]
    sin,
    out,  # [rows, dim]
    rows,
    heads,
    dim,
    half,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    inside = (r < rows)[:, None] & (d < dim)[None, :]
    place = d - (dim - 2 * half)
    turned = place >= 0
    mate = tl.where(turned, d + 1 - 2 * (place % 2), d)
    value = tl.load(x + r[:, None] * dim + d[None, :], inside, 0.0).to(tl.float32)
    other = tl.load(x + r[:, None] * dim + mate[None, :], inside, 0.0).to(tl.float32)
    angle = (r // heads)[:, None] * half + (place // 2)[None, :]
    known = inside & turned[None, :]
    c = tl.load(cos + angle, known, 1.0).to(tl.float32)
    s = tl.load(sin + angle, known, 0.0).to(tl.float32)
    rotated = tl.where((place % 2 == 0)[None, :], value * c - other * s, value * c + other * s)
    value = tl.where(turned[None, :], rotated, value)
    tl.store(out + r[:, None] * dim + d[None, :], value.to(out.dtype.element_ty), inside)


def index_vectors_triton(
    x: Tensor, norm: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, precision: Precision
) -> Tensor:
    """x [tokens, heads, dim] -> the same; norm: weight and bias [dim]. Contiguous arguments."""
    tokens, heads, dim = x.shape
    rows, fp8 = tokens * heads, precision is Precision.FP8
    out = torch.empty_like(x)
    launch(
        _index_vectors, (cdiv(rows, _ROWS),), x, *(norm or (x, x)), cos, sin, out,
        rows, heads, dim, cos.shape[1], LAYER_NORM_EPS, ACT_AMAX_MIN, dim**-0.5,
        NORM=norm is not None, FP8=fp8, LEVELS=dim.bit_length() - 1 if fp8 else 0,
        BLOCKS=cdiv(dim, FP8_BLOCK) if fp8 else 1, ROWS=_ROWS, DIM=next_power_of_2(dim),
    )  # fmt: skip
    return out


def trailing_pairs_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, dim] -> the same; contiguous arguments."""
    tokens, heads, dim = x.shape
    rows = tokens * heads
    out = torch.empty_like(x)
    launch(
        _trailing_pairs, (cdiv(rows, _ROWS),), x, cos, sin, out,
        rows, heads, dim, cos.shape[1], ROWS=_ROWS, DIM=next_power_of_2(dim),
    )  # fmt: skip
    return out
