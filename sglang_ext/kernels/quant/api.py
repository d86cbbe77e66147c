"""Checked entry to quantised storage; formats and formulas are in `core.quant`."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core import quant as vectorised
from sglang_ext.core.quant import FP4_BLOCK, FP8_BLOCK, as_bytes
from sglang_ext.kernels.choice import runs_triton

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_SCALES = (torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16)


def act_quant(
    x: Tensor, *, block: int = FP8_BLOCK, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """codes = e4m3(x / s), s = the power of two >= max(amax, 1e-4) / 448 of each block of a row.

    Args:
        x: [tokens, K] float; tokens may be 0, the last block may be partial.
        block: columns that share a scale.
        implementation: auto, torch or triton.

    Returns:
        codes [tokens, K] uint8 (e4m3) and scale [tokens, ceil(K / block)] uint8 (ue8m0).

    Raises:
        ValueError: a shape or dtype that does not fit, or an implementation that cannot run.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"act_quant: x: expected float [tokens, K], found {x.dtype} {list(x.shape)}"
        )
    if block < 1:
        raise ValueError(f"act_quant: block: expected at least 1, found {block}")
    if runs_triton("act_quant", implementation, x.device):
        from sglang_ext.kernels.quant.triton import act_quant_triton

        return act_quant_triton(x.contiguous(), block)
    return vectorised.act_quant(x, block=block)


def dequantise_fp8(
    codes: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK),
    dtype: torch.dtype = torch.float32,
    implementation: str = "auto",
) -> Tensor:
    """w[n, k] = e4m3(codes[n, k]) * scale[n // block_0, k // block_1].

    Args:
        codes: [N, K] uint8, int8 or float8_e4m3fn; the last blocks may be partial.
        scale: [ceil(N / block_0), ceil(K / block_1)] uint8 or float8_e8m0fnu (ue8m0), or float.
        block: rows and columns that share a scale.
        dtype: of the result.
        implementation: auto, torch or triton.

    Raises:
        ValueError: as `act_quant`.
    """
    op = "dequantise_fp8"
    _check_storage(op, "codes", codes)
    rows, columns = codes.shape
    if min(block) < 1:
        raise ValueError(f"{op}: block: expected two numbers of at least 1, found {block}")
    _check_scale(op, scale, (-(-rows // block[0]), -(-columns // block[1])))
    if runs_triton(op, implementation, codes.device):
        from sglang_ext.kernels.quant.triton import dequantise_fp8_triton

        return dequantise_fp8_triton(
            as_bytes(codes).contiguous(), _plain(scale).contiguous(), block, dtype
        )
    return vectorised.dequantise_fp8(codes, scale, block=block, dtype=dtype)


def dequantise_fp4(
    packed: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    implementation: str = "auto",
) -> Tensor:
    """w[n, k] = e2m1(nibble k of row n) * scale[n, k // 32], low nibble first.

    Args:
        packed: [N, K / 2] uint8 or int8.
        scale: [N, K / 32] uint8 or float8_e8m0fnu (ue8m0), or float.
        dtype: of the result.
        implementation: auto, torch or triton.

    Raises:
        ValueError: as `act_quant`.
    """
    op = "dequantise_fp4"
    _check_storage(op, "packed", packed)
    rows, half = packed.shape
    if 2 * half % FP4_BLOCK:
        raise ValueError(
            f"{op}: packed: expected K / 2 a multiple of {FP4_BLOCK // 2}, found {half}"
        )
    _check_scale(op, scale, (rows, 2 * half // FP4_BLOCK))
    if runs_triton(op, implementation, packed.device):
        from sglang_ext.kernels.quant.triton import dequantise_fp4_triton

        return dequantise_fp4_triton(
            as_bytes(packed).contiguous(), _plain(scale).contiguous(), dtype
        )
    return vectorised.dequantise_fp4(packed, scale, dtype=dtype)


def _plain(scale: Tensor) -> Tensor:
    """ue8m0 as uint8; floats as they are."""
    return as_bytes(scale) if scale.dtype.itemsize == 1 else scale


def _check_storage(op: str, name: str, codes: Tensor) -> None:
    if codes.dim() != 2 or codes.dtype not in _BYTES:
        raise ValueError(
            f"{op}: {name}: expected a matrix of one of {_BYTES}, found {codes.dtype} "
            f"{list(codes.shape)}"
        )


def _check_scale(op: str, scale: Tensor, shape: tuple[int, int]) -> None:
    if tuple(scale.shape) != shape or scale.dtype not in _SCALES:
        raise ValueError(
            f"{op}: scale: expected {list(shape)} of one of {_SCALES}, found {scale.dtype} "
            f"{list(scale.shape)}"
        )
