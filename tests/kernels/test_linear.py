"""Packed linears against fp32 arithmetic and against F.linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_ext.kernels.linear import (
    PackedLinear,
    PlainLinear,
    can_pack,
    make_gated,
    make_linear,
)

# Odd and prime sizes: oneDNN pads its blocks.
SHAPES = [(1, 1), (17, 31), (64, 96), (131, 257)]
needs_packing = pytest.mark.skipif(
    not can_pack(torch.ones(16, 16, dtype=torch.bfloat16)),
    reason="this processor does not multiply bf16 in oneDNN",
)


def _case(out: int, width: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(out * 1000 + width)
    return (
        torch.randn(rows, width).to(dtype),
        (torch.randn(out, width) / width**0.5).to(dtype),
        torch.randn(out).to(dtype),
        torch.randn(rows, out).to(dtype),
    )


@needs_packing
@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_equals_fp32_within_one_rounding(
    out: int, width: int, rows: int, biased: bool
) -> None:
    x, weight, bias, addend = _case(out, width, rows, torch.bfloat16)
    layer = make_linear(weight, bias if biased else None)
    assert isinstance(layer, PackedLinear)
    exact = F.linear(x.float(), weight.float(), bias.float() if biased else None)
    torch.testing.assert_close(layer(x).float(), exact, rtol=1 / 128, atol=1 / 128)
    torch.testing.assert_close(
        layer.plus(x, addend).float(), exact + addend.float(), rtol=1 / 64, atol=1 / 64
    )


@needs_packing
@pytest.mark.parametrize("rows", [2, 5, 8, 32])
def test_a_row_does_not_depend_on_its_neighbours(rows: int) -> None:
    x, weight, _, addend = _case(96, 160, rows, torch.bfloat16)
    layer = PackedLinear(weight)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(rows)])
    assert torch.equal(layer(x), alone)
    alone = torch.cat([layer.plus(x[i : i + 1], addend[i : i + 1]) for i in range(rows)])
    assert torch.equal(layer.plus(x, addend), alone)


@needs_packing
def test_inputs_need_not_be_contiguous_and_are_left_alone() -> None:
    x, weight, _, addend = _case(48, 64, 6, torch.bfloat16)
    layer, wide = PackedLinear(weight), torch.full((6, 128), torch.nan, dtype=torch.bfloat16)
    wide[:, 32:96] = x
    before = addend.clone()
    assert torch.equal(layer(wide[:, 32:96]), layer(x))
    layer.plus(x, addend)
    assert torch.equal(addend, before)


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_fp32_keeps_the_bits_of_f_linear(out: int, width: int) -> None:
    x, weight, bias, addend = _case(out, width, 3, torch.float32)
    layer = make_linear(weight, bias)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(x), F.linear(x, weight, bias))
    assert torch.equal(layer.plus(x, addend), F.linear(x, weight, bias) + addend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_gated_is_silu_of_one_half_times_the_other(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias, _ = _case(2 * 37, 64, rows, dtype)
    gate, up = F.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    tolerance = 1e-6 if dtype == torch.float32 else 1 / 32
    torch.testing.assert_close(
        make_gated(weight, bias)(x).float(), F.silu(gate) * up, rtol=tolerance, atol=tolerance
    )


def test_only_bf16_matrices_on_the_cpu_are_packed() -> None:
    assert not can_pack(torch.ones(8, 8))
    assert not can_pack(torch.ones(8, 8, dtype=torch.float16))
    assert not can_pack(torch.ones(8, dtype=torch.bfloat16))
    assert not can_pack(torch.empty(0, 8, dtype=torch.bfloat16))
    assert not can_pack(torch.empty(8, 8, dtype=torch.bfloat16, device="meta"))
