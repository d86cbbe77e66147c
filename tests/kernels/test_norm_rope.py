"""Norm and rotation against their formulas in double precision."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.rope import rotate_half_split, split_cache
from sglang_ext.kernels.norm import RmsNorm, rms_norm
from sglang_ext.kernels.rope import RotaryTables, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("width", [1, 31, 576])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, scale: float) -> None:
    torch.manual_seed(rows)
    x = (scale * torch.randn(rows, width)).to(dtype)
    weight = (1 + 0.1 * torch.randn(width)).to(dtype)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 1 / 128
    for found in (RmsNorm(weight, 1e-6)(x), rms_norm(x, weight, 1e-6)):
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * 1e-3)


def test_rms_norm_with_a_large_mean() -> None:
    x = (1000 + torch.randn(3, 64)).bfloat16()
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert torch.equal(RmsNorm(weight, 1e-6)(x), torch.rms_norm(x, (64,), weight, 1e-6))


def test_rms_norm_of_fp32_keeps_the_bits_of_torch() -> None:
    x, weight = torch.randn(5, 96), torch.randn(96)
    assert torch.equal(RmsNorm(weight, 1e-6)(x), torch.rms_norm(x, (96,), weight, 1e-6))


@pytest.mark.parametrize("heads", [1, 5])
def test_rotation_equals_the_reference(heads: int) -> None:
    torch.manual_seed(0)
    angles = torch.outer(torch.arange(50).float(), torch.rand(8))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([0, 3, 3, 49, 17])
    x = torch.randn(5, heads, 16)
    cos, sin = split_cache(cache)
    expected = rotate_half_split(x, cos[positions], sin[positions])
    found = rotate(x, *RotaryTables(cache).rows(positions))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(rotate(x, *RotaryTables(cache).rows(positions * 0)), x)
