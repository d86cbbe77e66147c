"""Low-precision storage of DeepSeek checkpoints, decoded from bits.

    e4m3     8-bit float, 1-4-3, bias 7, largest 448, 0x7f and 0xff are NaN, no infinity
    ue8m0    8-bit scale, value 2^(byte - 127), 255 is NaN
    e2m1     4-bit float, 1-2-1: 0 .5 1 1.5 2 3 4 6 and their negatives; two in a byte, the
             element with the lower index in the low nibble

No device needs 8-bit or 4-bit float arithmetic for this: tensors are read as bytes. Every value
of these formats, and every product with a power of two in range, is exact in float32 and, for a
weight whose scale is a power of two, in bfloat16.

Source: OCP Microscaling Formats (MX) 1.0 for e2m1 and ue8m0; OCP 8-bit floating point 1.0 for
e4m3; block shapes as DeepSeek-V3, V3.2 and V4 store them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_BLOCK = 128
FP4_BLOCK = 32
# Below this a block counts as this large; an all-zero block then has a finite scale.
ACT_AMAX_MIN = 1e-4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def as_bytes(x: Tensor) -> Tensor:
    """The same storage read as uint8; uint8, int8, float8_e4m3fn or float8_e8m0fnu."""
    if x.dtype not in _BYTE_DTYPES:
        raise ValueError(f"as_bytes: expected an 8-bit dtype of {_BYTE_DTYPES}, found {x.dtype}")
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """8-bit storage of e4m3, any shape -> float32."""
    bits = as_bytes(codes).int()
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = ((exponent + 120) << 23) | (mantissa << 20)
    value = torch.where(exponent > 0, normal.view(torch.float32), mantissa * 2.0**-9)
    value = torch.where(bits >= 128, -value, value)
    return value.masked_fill_((bits & 127) == 127, float("nan"))


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3, ties to even, beyond 448 saturated; float, any shape -> uint8."""
    value = x.float()
    magnitude = value.abs().clamp(max=E4M3_MAX)
    # Subnormals share the quantum of the smallest normal exponent, -6.
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=-6)
    exponent = torch.where(magnitude == 0, -6, exponent)
    steps = torch.round(torch.ldexp(magnitude, 3 - exponent)).int()
    # steps == 16 carries into the next exponent by itself.
    code = ((exponent + 6) << 3) + steps
    code = torch.where(value.isnan(), 127, code) | (torch.signbit(value).int() << 7)
    return code.to(torch.uint8)


def decode_ue8m0(codes: Tensor) -> Tensor:
    """8-bit storage of ue8m0, any shape -> float32; 0 is the subnormal 2^-127."""
    bits = as_bytes(codes).int()
    value = torch.where(bits > 0, bits << 23, 1 << 22).view(torch.float32)
    return value.masked_fill(bits == 255, float("nan"))


def encode_ue8m0(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below a positive scale; any shape -> uint8."""
    mantissa, exponent = torch.frexp(scale.float())
    # scale = mantissa * 2^exponent with mantissa in [1/2, 1): exact powers have 1/2.
    exponent = exponent - (mantissa == 0.5).int()
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def decode_scale(scale: Tensor) -> Tensor:
    """A stored scale as float32: floats as they are (DeepSeek-V3.2), bytes as ue8m0 (V4)."""
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    return decode_ue8m0(scale)


def _spread(scale: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """Scale of each element; scale [ceil(rows / b0), ceil(columns / b1)] -> [rows, columns]."""
    full = scale.repeat_interleave(block[0], dim=0)[:rows] if block[0] > 1 else scale
    return full.repeat_interleave(block[1], dim=1)[:, :columns]


def dequantise_fp8(
    codes: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """w[n, k] = e4m3(codes[n, k]) * scale[n // block_0, k // block_1].

    Args:
        codes: [N, K], 8-bit storage of e4m3. The last blocks may be partial.
        scale: [ceil(N / block_0), ceil(K / block_1)], ue8m0 storage or float.
        block: rows and columns that share a scale; (1, 128) undoes `act_quant`.

    Returns:
        [N, K] in `dtype`.
    """
    rows, columns = codes.shape
    wide = _spread(decode_scale(scale), rows, columns, block)
    return decode_e4m3(codes).mul_(wide).to(dtype)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[..., K / 2] bytes of two e2m1 each, low nibble first -> [..., K] float32."""
    bits = as_bytes(packed).int()
    nibbles = torch.stack((bits & 15, bits >> 4), dim=-1).flatten(-2)
    table = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=packed.device)
    return table[nibbles]


def pack_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1, ties to the even code, beyond 6 saturated; [..., K] -> [..., K / 2] uint8."""
    magnitude = x.float().abs().clamp(max=E2M1_MAX)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=0)
    steps = torch.round(torch.ldexp(magnitude, 1 - exponent)).int()
    code = ((exponent << 1) + steps) | (torch.signbit(x).int() << 3)
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).to(torch.uint8)


def dequantise_fp4(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """w[..., k] = e2m1(k-th nibble) * scale[..., k // 32].

    Args:
        packed: [..., K / 2], 8-bit storage, low nibble first.
        scale: [..., K / 32], ue8m0 storage or float.

    Returns:
        [..., K] in `dtype`.
    """
    wide = decode_scale(scale).repeat_interleave(FP4_BLOCK, dim=-1)
    return unpack_e2m1(packed).mul_(wide).to(dtype)


def act_quant(x: Tensor, *, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Activations as e4m3 with one power-of-two scale per `block` columns of a row.

    scale = the smallest power of two >= max(amax, 1e-4) / 448, codes = e4m3(x / scale).

    Args:
        x: [tokens, K]; the last block may be partial.

    Returns:
        codes [tokens, K] uint8 and scale [tokens, ceil(K / block)] uint8 (ue8m0).
    """
    return _quantise_fp8(x, (1, block), ACT_AMAX_MIN)


def quantise_fp8(
    weight: Tensor, *, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> tuple[Tensor, Tensor]:
    """Inverse of `dequantise_fp8`, to nearest: [N, K] -> codes [N, K] and scale, both uint8."""
    return _quantise_fp8(weight, block, torch.finfo(torch.float32).tiny)


def _quantise_fp8(x: Tensor, block: tuple[int, int], amax_min: float) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    height, width = -(-rows // block[0]), -(-columns // block[1])
    padding = (0, width * block[1] - columns, 0, height * block[0] - rows)
    blocks = F.pad(x.float().abs(), padding).view(height, block[0], width, block[1])
    scale = encode_ue8m0(blocks.amax(dim=(1, 3)).clamp(min=amax_min) / E4M3_MAX)
    return encode_e4m3(x.float() / _spread(decode_ue8m0(scale), rows, columns, block)), scale


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `dequantise_fp4`, to nearest.

    weight [..., K], K % 32 == 0 -> packed [..., K / 2] and scale [..., K / 32], both uint8.
    """
    blocks = weight.float().unflatten(-1, (-1, FP4_BLOCK))
    tiny = torch.finfo(torch.float32).tiny
    scale = encode_ue8m0(blocks.abs().amax(dim=-1).clamp(min=tiny) / E2M1_MAX)
    return pack_e2m1((blocks / decode_ue8m0(scale).unsqueeze(-1)).flatten(-2)), scale
