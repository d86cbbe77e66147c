"""Token rows as e4m3 with one scale per 128 columns, the form in which DeepEP sends them."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.quant import (
    ACT_AMAX_MIN,
    E4M3_MAX,
    FP8_BLOCK,
    decode_ue8m0,
    encode_e4m3,
    encode_ue8m0,
)


def quantise_rows(x: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """x ~= codes * scale, scale = max(amax, 1e-4) / 448 over each 128 columns of a row.

    Args:
        x: [N, H] float, H % 128 == 0.
        power_of_two: round the scale up to a power of two.

    Returns:
        codes [N, H] float8_e4m3fn, scale [N, H / 128] float32.
    """
    if x.shape[1] % FP8_BLOCK:
        raise ValueError(f"hidden: expected a multiple of {FP8_BLOCK} for fp8, found {x.shape[1]}")
    blocks = x.float().unflatten(1, (-1, FP8_BLOCK))
    scale = blocks.abs().amax(dim=2).clamp(min=ACT_AMAX_MIN) / E4M3_MAX
    if power_of_two:
        scale = decode_ue8m0(encode_ue8m0(scale))
    codes = encode_e4m3((blocks / scale[:, :, None]).flatten(1))
    return codes.view(torch.float8_e4m3fn), scale


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Exponents of four power-of-two scales per int32, first in the low byte.

    scale [..., H / 128] float32, H % 512 == 0 -> [..., H / 512] int32.
    """
    if scale.shape[-1] % 4:
        found = scale.shape[-1] * FP8_BLOCK
        raise ValueError(f"hidden: expected a multiple of {4 * FP8_BLOCK} for ue8m0, found {found}")
    return encode_ue8m0(scale).contiguous().view(torch.int32)
