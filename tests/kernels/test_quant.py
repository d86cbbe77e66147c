"""Quantised storage: every code, every rounding boundary, and where each scale belongs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.core import quant
from sglang_ext.kernels.quant import act_quant, dequantise_fp4, dequantise_fp8
from sglang_ext.kernels.quant.reference import (
    act_quant_reference,
    dequantise_fp4_reference,
    dequantise_fp8_reference,
    e2m1_value,
    e4m3_nearest,
    e4m3_value,
    ue8m0_value,
)
from tests.kernels.backend import Backend

pytestmark = pytest.mark.usefixtures("poisoned")

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
# e4m3 of 1.0 and the ue8m0 of 1.0.
ONE_E4M3, ONE_UE8M0 = 0x38, 127


def _codes(shape: tuple[int, int], bound: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 100 + shape[1])
    return torch.randint(0, bound, shape, generator=generator, dtype=torch.uint8)


def _scales(shape: tuple[int, int]) -> Tensor:
    return (_codes(shape, 40) + 107).to(torch.uint8)


def test_all_bytes_of_e4m3(backend: Backend) -> None:
    expected = torch.tensor([e4m3_value(c) for c in range(256)])
    native = ALL_BYTES.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(expected, native, rtol=0, atol=0, equal_nan=True)
    one = torch.full((1, 2), ONE_UE8M0, dtype=torch.uint8)
    found = dequantise_fp8(
        backend.place(ALL_BYTES.view(1, 256)), backend.place(one),
        implementation=backend.implementation,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu().view(-1), expected, rtol=0, atol=0, equal_nan=True)


def test_all_bytes_of_ue8m0_and_e2m1(backend: Backend) -> None:
    expected = torch.tensor([ue8m0_value(c) for c in range(256)])
    native = ALL_BYTES.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(expected, native, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        quant.decode_ue8m0(ALL_BYTES), expected, rtol=0, atol=0, equal_nan=True
    )
    codes = torch.full((256, 1), ONE_E4M3, dtype=torch.uint8)
    found = dequantise_fp8(
        backend.place(codes), backend.place(ALL_BYTES.view(256, 1)), block=(1, 1),
        implementation=backend.implementation,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu().view(-1), expected, rtol=0, atol=0, equal_nan=True)
    one = torch.full((1, 16), ONE_UE8M0, dtype=torch.uint8)
    nibbles = dequantise_fp4(
        backend.place(ALL_BYTES.view(1, 256)), backend.place(one),
        implementation=backend.implementation,
    )  # fmt: skip
    pairs = [e2m1_value(half) for c in range(256) for half in (c & 15, c >> 4)]
    assert nibbles.cpu().view(-1).tolist() == pairs


def test_every_code_survives_a_round_trip() -> None:
    numbers = [c for c in range(256) if c & 127 != 127]
    decoded = quant.decode_e4m3(ALL_BYTES)
    assert quant.encode_e4m3(decoded)[numbers].tolist() == numbers
    assert (quant.encode_e4m3(decoded)[[127, 255]] & 127 == 127).all()
    assert torch.equal(quant.pack_e2m1(quant.unpack_e2m1(ALL_BYTES)), ALL_BYTES)
    scales = quant.decode_ue8m0(ALL_BYTES[:255])
    assert torch.equal(quant.encode_ue8m0(scales), ALL_BYTES[:255])
    assert quant.encode_ue8m0(torch.nextafter(scales[1:254], scales[2:255])).tolist() == list(
        range(2, 255)
    )


def test_rounding_at_every_boundary(backend: Backend) -> None:
    """Between two neighbours: the middle goes to the even code, a hair off it to the nearer."""
    grid = torch.tensor([e4m3_value(c) for c in range(127)])
    middle = (grid[:-1] + grid[1:]) / 2
    below, above = torch.nextafter(middle, grid[:-1]), torch.nextafter(middle, grid[1:])
    even = [c if c % 2 == 0 else c + 1 for c in range(126)]
    values = torch.cat((middle, below, above))
    expected = even + list(range(126)) + list(range(1, 127))
    # 448 in every block pins its scale to 1.
    blocks = torch.cat((torch.full((len(values), 1), 448.0), values.unsqueeze(1)), dim=1)
    for sign, bit in ((1.0, 0), (-1.0, 128)):
        codes, scale = act_quant(
            backend.place(sign * blocks), block=2, implementation=backend.implementation
        )
        assert (scale == ONE_UE8M0).all()
        assert codes[:, 1].tolist() == [c | bit for c in expected]


@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=300, deadline=None)
def test_encoding_any_float(x: float) -> None:
    assert int(quant.encode_e4m3(torch.tensor(x))) == e4m3_nearest(x)


@given(st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
@settings(max_examples=300, deadline=None)
def test_scale_is_the_smallest_power_of_two_that_covers(x: float) -> None:
    code = int(quant.encode_ue8m0(torch.tensor(x)))
    assert ue8m0_value(code) >= x > ue8m0_value(code - 1)


@pytest.mark.parametrize("block", [128, 32, 50])
@pytest.mark.parametrize("shape", [(5, 131), (0, 64), (1, 1), (17, 128)])
def test_act_quant(shape: tuple[int, int], block: int, backend: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-20, 10, shape, generator=generator).float())
    x = torch.randn(shape, generator=generator) * size
    x[2:3] = 0
    codes, scale = act_quant(backend.place(x), block=block, implementation=backend.implementation)
    by_loop = act_quant_reference(x, block) if shape[0] else (codes.cpu(), scale.cpu())
    assert torch.equal(scale.cpu(), by_loop[1])
    assert torch.equal(codes.cpu(), by_loop[0])
    assert codes.shape == shape
    back = dequantise_fp8(codes, scale, block=(1, block), implementation=backend.implementation)
    error = (back.cpu() - x).abs()
    # Half a step: 2^-4 of the value, or 2^-10 of the scale among subnormals.
    wide = quant.decode_ue8m0(scale.cpu()).repeat_interleave(block, 1)[:, : shape[1]]
    assert (error <= torch.maximum(x.abs() / 16, wide * 2.0**-10)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(131, 257), (128, 128), (1, 3), (0, 128)])
def test_dequantise_fp8(shape: tuple[int, int], dtype: torch.dtype, backend: Backend) -> None:
    codes, scale = _codes(shape, 127), _scales((-(-shape[0] // 128), -(-shape[1] // 128)))
    found = dequantise_fp8(
        backend.place(codes), backend.place(scale), dtype=dtype,
        implementation=backend.implementation,
    )  # fmt: skip
    if shape[0] * shape[1] < 1000:
        expected = dequantise_fp8_reference(codes, scale, (128, 128))
    else:
        native = codes.view(torch.float8_e4m3fn).float()
        rows, columns = torch.arange(shape[0]) // 128, torch.arange(shape[1]) // 128
        expected = native * scale.view(torch.float8_e8m0fnu).float()[rows][:, columns]
    # A power-of-two scale loses nothing, in bfloat16 either.
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=0)


def test_dequantise_fp8_with_float_scales(backend: Backend) -> None:
    codes, scale = _codes((7, 40), 127), torch.rand(2, 2) + 0.5
    found = dequantise_fp8(
        backend.place(codes), backend.place(scale), block=(4, 32),
        implementation=backend.implementation,
    )  # fmt: skip
    rows, columns = torch.arange(7) // 4, torch.arange(40) // 32
    expected = codes.view(torch.float8_e4m3fn).float() * scale[rows][:, columns]
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(5, 32), (3, 160), (17, 416), (0, 64)])
def test_dequantise_fp4(shape: tuple[int, int], backend: Backend) -> None:
    packed, scale = _codes((shape[0], shape[1] // 2)), _scales((shape[0], shape[1] // 32))
    found = dequantise_fp4(
        backend.place(packed), backend.place(scale), implementation=backend.implementation
    )
    expected = dequantise_fp4_reference(packed, scale)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def test_the_low_nibble_comes_first(backend: Backend) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0x21, 0xF7])
    one = torch.full((1, 1), ONE_UE8M0, dtype=torch.uint8)
    found = dequantise_fp4(
        backend.place(packed), backend.place(one), implementation=backend.implementation
    )
    assert found[0, :4].tolist() == [0.5, 1.0, 6.0, -6.0]


def test_each_scale_lands_on_its_own_block(backend: Backend) -> None:
    """All codes 1.0, all scales different: the result is the map of scales."""
    codes = torch.full((5, 9), ONE_E4M3, dtype=torch.uint8)
    scale = (torch.arange(15) + 110).view(3, 5).to(torch.uint8)
    found = dequantise_fp8(
        backend.place(codes), backend.place(scale), block=(2, 2),
        implementation=backend.implementation,
    )  # fmt: skip
    for n in range(5):
        for k in range(9):
            assert found[n, k] == 2.0 ** (110 + 5 * (n // 2) + k // 2 - 127)
    packed = torch.full((3, 32), 0x22, dtype=torch.uint8)
    scale = (torch.arange(6) + 120).view(3, 2).to(torch.uint8)
    found = dequantise_fp4(
        backend.place(packed), backend.place(scale), implementation=backend.implementation
    )
    expected = torch.exp2(torch.arange(6).float() - 7).view(3, 2).repeat_interleave(32, 1)
    assert torch.equal(found.cpu(), expected)


def test_layers_keep_their_own_scales(backend: Backend) -> None:
    """Two layers of equal codes in one buffer; the other layer's scales are 4 times too large."""
    grid = quant.decode_e4m3(_codes((64, 96), 127))
    grid[0, 0] = 448.0
    stored = [quant.quantise_fp8(w) for w in (grid, 4 * grid)]
    assert torch.equal(stored[0][0], stored[1][0])
    codes = backend.place(torch.stack([codes for codes, _ in stored]))
    scales = backend.place(torch.stack([scale for _, scale in stored]))
    options = {"implementation": backend.implementation}
    for layer, weight in enumerate((grid, 4 * grid)):
        found = dequantise_fp8(codes[layer], scales[layer], **options)
        assert torch.equal(found.cpu(), weight)
    mixed = dequantise_fp8(codes[0], scales[1], **options)
    assert torch.equal(mixed.cpu(), 4 * grid)
    nibbles = quant.unpack_e2m1(_codes((8, 32)))
    nibbles[:, ::32] = 6.0
    for factor in (0.25, 8.0):
        packed, scale = quant.quantise_fp4(factor * nibbles)
        placed = (backend.place(packed), backend.place(scale))
        assert torch.equal(dequantise_fp4(*placed, **options).cpu(), factor * nibbles)


def test_native_dtypes_are_read_as_bytes(backend: Backend) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = quant.quantise_fp8(weight)
    options = {"implementation": backend.implementation}
    plain = dequantise_fp8(codes.to(backend.device), scale.to(backend.device), **options)
    native = dequantise_fp8(
        codes.to(backend.device).view(torch.float8_e4m3fn),
        scale.to(backend.device).view(torch.float8_e8m0fnu),
        **options,
    )
    assert torch.equal(plain, native)
    # 3 mantissa bits: within 1/16 of the value, or half a step of the smallest normals.
    torch.testing.assert_close(plain.cpu(), weight, rtol=1 / 16, atol=4.0 * 2**-16)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.zeros(2, 1, dtype=torch.uint8), r"scale: expected \[1, 2\]"),
        (torch.zeros(1, 2, dtype=torch.int32), "found torch.int32"),
    ],
)
def test_fp8_refuses(scale: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantise_fp8(_codes((8, 256)), scale)


def test_fp4_refuses_a_partial_block() -> None:
    with pytest.raises(ValueError, match="K / 2 a multiple of 16, found 8"):
        dequantise_fp4(_codes((2, 8)), torch.zeros(2, 1, dtype=torch.uint8))
