"""Quantised storage value by value, from the definitions of the formats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(code: int) -> float:
    """(-1)^sign * 2^(exponent - 7) * 1.mantissa, or 2^-6 * 0.mantissa where exponent is 0."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 127 == 127:
        return math.nan
    if exponent == 0:
        return sign * 2.0**-6 * mantissa / 8
    return sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)


def e4m3_nearest(x: float) -> int:
    """Code nearest to x, the even code among two, saturated."""
    sign = 128 if math.copysign(1.0, x) < 0 else 0
    magnitude = min(abs(x), 448.0)
    return sign | min(range(127), key=lambda c: (abs(e4m3_value(c) - magnitude), c % 2))


def ue8m0_value(code: int) -> float:
    """2^(code - 127); 255 is not a number."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def e2m1_value(code: int) -> float:
    """Low three bits the magnitude, top bit the sign."""
    return math.copysign(_E2M1[code & 7], -1.0 if code & 8 else 1.0)


def dequantise_fp8_reference(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """codes [N, K] uint8, scale [ceil(N / b0), ceil(K / b1)] uint8 -> [N, K] float32."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            factor = ue8m0_value(int(scale[n // block[0], k // block[1]]))
            out[n, k] = e4m3_value(int(codes[n, k])) * factor
    return out


def dequantise_fp4_reference(packed: Tensor, scale: Tensor) -> Tensor:
    """packed [N, K / 2] uint8, scale [N, K / 32] uint8 -> [N, K] float32."""
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half)
    for n in range(rows):
        for k in range(2 * half):
            byte = int(packed[n, k // 2])
            nibble = byte >> 4 if k % 2 else byte & 15
            out[n, k] = e2m1_value(nibble) * ue8m0_value(int(scale[n, k // 32]))
    return out


def act_quant_reference(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """x [tokens, K] -> codes [tokens, K] and scale [tokens, ceil(K / block)], uint8."""
    tokens, columns = x.shape
    codes = torch.empty(tokens, columns, dtype=torch.uint8)
    scale = torch.empty(tokens, -(-columns // block), dtype=torch.uint8)
    for t in range(tokens):
        for b in range(scale.shape[1]):
            values = x[t, b * block : (b + 1) * block].float().tolist()
            amax = torch.tensor(max([1e-4, *map(abs, values)]))
            byte = next(c for c in range(255) if ue8m0_value(c) >= float(amax / 448.0))
            scale[t, b] = byte
            for i, value in enumerate(values):
                codes[t, b * block + i] = e4m3_nearest(value / ue8m0_value(byte))
    return codes, scale
