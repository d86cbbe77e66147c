"""Quantised storage in Triton, from bits: no 8-bit float type is used, so sm_80 runs it too."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.quant import ACT_AMAX_MIN
from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2

_BLOCK_ROWS = 16


@triton.jit
def e4m3_to_float(code):
    """uint8 -> float32. Subnormals are mantissa * 2^-9; 0x7f and 0xff are NaN."""
    bits = code.to(tl.int32)
    exponent = (bits >> 3) & 15
    mantissa = bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
    value = tl.where((bits & 127) == 127, float("nan"), value)
    return tl.where(bits >= 128, -value, value)


@triton.jit
def float_to_e4m3(x):
    """float32 -> uint8, nearest, ties to even, saturated at 448; NaN becomes 0x7f or 0xff."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    magnitude = tl.minimum(tl.abs(x), 448.0)
    wide = magnitude.to(tl.int32, bitcast=True)
    # Normal: round the 20 dropped mantissa bits half to even, then rebias 127 to 7.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - 960
    # Subnormal: adding 2^14 leaves multiples of 2^-9 in the lowest mantissa bits, rounded.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (tl.where(x != x, 127, code) | sign).to(tl.uint8)


@triton.jit
def ue8m0_to_float(code):
    """uint8 -> float32; 0 is the subnormal 2^-127."""
    bits = code.to(tl.int32)
    value = tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)
    return tl.where(bits == 255, float("nan"), value)


@triton.jit
def power_of_two_scale(amax):
    """Largest magnitudes -> (exponents of their ue8m0 scales, reciprocals of the scales)."""
    bits = tl.div_rn(amax, 448.0).to(tl.int32, bitcast=True)
    # The exponent, one up unless the mantissa is zero: the next power of two.
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    # 2^(127 - exponent): the reciprocal of a power of two is exact.
    return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float(code):
    """int32 below 16 -> float32; a normal e2m1 is a float32 whose exponent is rebiased by 126."""
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def _act_quant(
    x,  # [tokens, width]
    codes,  # [tokens, width] uint8
    scale,  # [tokens, blocks] uint8
    tokens,
    width,
    blocks,
    amax_min,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1)
    i = tl.arange(0, PADDED)
    column = b * BLOCK + i
    inside = (t < tokens)[:, None] & ((i < BLOCK) & (column < width))[None, :]
    at = t[:, None] * width + column[None, :]
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(value), axis=1), amax_min)
    exponent, inverse = power_of_two_scale(amax)
    tl.store(codes + at, float_to_e4m3(value * inverse[:, None]), inside)
    tl.store(scale + t * blocks + b, exponent.to(tl.uint8), t < tokens)


@triton.jit
def _dequantise_fp8(
    codes,  # [rows, width] uint8
    scale,  # [row blocks, blocks] uint8 or float
    out,  # [rows, width]
    rows,
    width,
    blocks,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1)
    i = tl.arange(0, PADDED)
    column = b * BLOCK_K + i
    inside = (n < rows)[:, None] & ((i < BLOCK_K) & (column < width))[None, :]
    at = n[:, None] * width + column[None, :]
    stored = tl.load(scale + (n // BLOCK_N) * blocks + b, n < rows, 0)
    if BYTES:
        factor = ue8m0_to_float(stored)
    else:
        factor = stored.to(tl.float32)
    value = e4m3_to_float(tl.load(codes + at, inside, 0)) * factor[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def _dequantise_fp4(
    packed,  # [rows, width / 2] uint8
    scale,  # [rows, width / GROUP] uint8 or float
    out,  # [rows, width]
    rows,
    half,  # width / 2
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * HALF + tl.arange(0, HALF)
    inside = (n < rows)[:, None] & (byte < half)[None, :]
    stored = tl.load(packed + n[:, None] * half + byte[None, :], inside, 0).to(tl.int32)
    groups = 2 * half // GROUP
    factor = tl.load(scale + n[:, None] * groups + (2 * byte // GROUP)[None, :], inside, 0)
    if BYTES:
        factor = ue8m0_to_float(factor)
    else:
        factor = factor.to(tl.float32)
    # Both nibbles of a byte lie in one group; the low one comes first.
    low = e2m1_to_float(stored & 15) * factor
    high = e2m1_to_float(stored >> 4) * factor
    value = tl.reshape(tl.join(low, high), (ROWS, 2 * HALF))
    column = tl.program_id(1) * 2 * HALF + tl.arange(0, 2 * HALF)
    inside = (n < rows)[:, None] & (column < 2 * half)[None, :]
    tl.store(
        out + n[:, None] * (2 * half) + column[None, :], value.to(out.dtype.element_ty), inside
    )


def act_quant_triton(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `api.act_quant`; x contiguous."""
    tokens, width = x.shape
    blocks = cdiv(width, block)
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(tokens, blocks, dtype=torch.uint8, device=x.device)
    launch(
        _act_quant, (cdiv(tokens, _BLOCK_ROWS), blocks),
        x, codes, scale, tokens, width, blocks, ACT_AMAX_MIN,
        BLOCK=block, PADDED=next_power_of_2(block), ROWS=_BLOCK_ROWS,
    )  # fmt: skip
    return codes, scale


def dequantise_fp8_triton(
    codes: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """See `api.dequantise_fp8`; contiguous, scale uint8 or float."""
    rows, width = codes.shape
    out = torch.empty(rows, width, dtype=dtype, device=codes.device)
    launch(
        _dequantise_fp8, (cdiv(rows, _BLOCK_ROWS), scale.shape[1]),
        codes, scale, out, rows, width, scale.shape[1],
        BLOCK_N=block[0], BLOCK_K=block[1], PADDED=next_power_of_2(block[1]),
        BYTES=scale.dtype == torch.uint8, ROWS=_BLOCK_ROWS,
    )  # fmt: skip
    return out


def dequantise_fp4_triton(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `api.dequantise_fp4`; contiguous, scale uint8 or float."""
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=dtype, device=packed.device)
    tile = 64
    launch(
        _dequantise_fp4, (cdiv(rows, _BLOCK_ROWS), cdiv(half, tile)),
        packed, scale, out, rows, half,
        BYTES=scale.dtype == torch.uint8, GROUP=32, ROWS=_BLOCK_ROWS, HALF=tile,
    )  # fmt: skip
    return out
