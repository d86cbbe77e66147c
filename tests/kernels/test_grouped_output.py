"""Inverse rotation and grouped projection against a loop and against the rotation itself."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.rope import rotate_trailing_pairs
from sglang_ext.kernels.grouped_output import grouped_output
from sglang_ext.kernels.grouped_output.reference import grouped_output_reference
from tests.kernels.backend import MATMUL_DTYPES, Backend

pytestmark = pytest.mark.usefixtures("poisoned")

# (tokens, heads, head_dim, rope, groups, rank) and why.
SHAPES = {
    "groups of two heads, prime rank": (5, 6, 32, 16, 3, 7),
    "one group": (3, 2, 48, 16, 1, 5),
    "tokens and rank beyond a tile": (35, 4, 64, 16, 2, 67),
    "the whole head rotates": (2, 2, 32, 32, 2, 3),
    "a tile of 64": (2, 2, 192, 64, 2, 17),
    "no tokens": (0, 2, 32, 16, 1, 5),
}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    tokens, heads, dim, rope, groups, rank = shape
    generator = torch.Generator().manual_seed(sum(shape))
    o = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    angle = 10 * torch.randn(tokens, rope // 2, generator=generator)
    inner = heads // groups * dim
    weight = torch.randn(groups, rank, inner, generator=generator) / inner**0.5
    return o, angle.cos(), angle.sin(), weight.to(dtype)


@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> None:
    inputs = _inputs(shape, dtype)
    found = grouped_output(
        *(backend.place(x) for x in inputs), implementation=backend.implementation
    )
    assert found.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    expected = grouped_output_reference(*inputs)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


def test_the_inverse_undoes_the_rotation(backend: Backend) -> None:
    o, cos, sin, _ = _inputs((7, 2, 32, 16, 1, 32), torch.float32)
    identity = torch.eye(64).view(1, 64, 64)
    rotated = rotate_trailing_pairs(o, cos, sin)
    assert not torch.allclose(rotated, o)
    found = grouped_output(
        *(backend.place(x) for x in (rotated, cos, sin, identity)),
        implementation=backend.implementation,
    )
    torch.testing.assert_close(found.cpu(), o.flatten(1), rtol=1e-5, atol=1e-5)


def test_pairs_are_neighbours_and_trailing() -> None:
    """A quarter turn of one pair: (1, 2) -> (-2, 1); its inverse: (2, -1)."""
    x = torch.tensor([[[5.0, 6.0, 1.0, 2.0]]])
    cos, sin = torch.zeros(1, 1), torch.ones(1, 1)
    assert rotate_trailing_pairs(x, cos, sin).tolist() == [[[5.0, 6.0, -2.0, 1.0]]]
    assert rotate_trailing_pairs(x, cos, sin, inverse=True).tolist() == [[[5.0, 6.0, 2.0, -1.0]]]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, torch.zeros(4, 8), r"cos, sin: expected both \[5, rope / 2\]"),
        (3, torch.zeros(4, 7, 64), "expected torch.float32 .a divisor of 6 heads"),
        (3, torch.zeros(3, 7, 63), "expected inner size 64"),
        (3, torch.zeros(3, 7, 64, dtype=torch.bfloat16), "found torch.bfloat16"),
    ],
)
def test_refuses(index: int, value: torch.Tensor, message: str) -> None:
    inputs = list(_inputs((5, 6, 32, 16, 3, 7), torch.float32))
    inputs[index] = value
    with pytest.raises(ValueError, match=message):
        grouped_output(*inputs)


def test_a_rope_below_a_tile_runs_in_torch_and_is_refused_by_name() -> None:
    inputs = _inputs((5, 4, 20, 4, 2, 3), torch.float32)
    torch.testing.assert_close(
        grouped_output(*inputs), grouped_output_reference(*inputs), rtol=2e-5, atol=2e-5
    )
    with pytest.raises(ValueError, match="multiples of 16 for 'triton', found 4 and 16"):
        grouped_output(*inputs, implementation="triton")
