"""The clamped swiglu against Python's own floats."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.kernels.swiglu import clamped_swiglu
from sglang_ext.kernels.swiglu.reference import clamped_swiglu_reference
from tests.kernels.backend import Backend

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 37), (2, 1030), (0, 8)])
def test_against_the_reference(rows: int, width: int, dtype: torch.dtype, backend: Backend) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    both = (12 * torch.randn(rows, 2 * width, generator=generator)).to(dtype)
    halves = backend.place(both).chunk(2, dim=-1)
    found = clamped_swiglu(*halves, 7.0, implementation=backend.implementation)
    assert found.dtype == dtype
    expected = clamped_swiglu_reference(*both.chunk(2, dim=-1), 7.0)
    loose = {"rtol": 2e-3, "atol": 1e-5} if dtype == torch.float16 else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(found.float().cpu(), expected, **loose)


def test_ends_of_the_range(backend: Backend) -> None:
    """The gate is clamped from above only, up from both sides; NaN stays."""
    nan = float("nan")
    gate = torch.tensor([[20.0, -20.0, -3000.0, nan, 1.0, 10.0]])
    up = torch.tensor([[20.0, -20.0, 5.0, 1.0, nan, -10.0]])
    placed = (backend.place(gate), backend.place(up))
    found = clamped_swiglu(*placed, 10.0, implementation=backend.implementation).cpu()
    expected = clamped_swiglu_reference(gate, up, 10.0)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0, 2] == 0.0
    assert found[0, :1] == pytest.approx(99.9955, abs=1e-3)


@pytest.mark.parametrize(
    ("gate", "up", "limit", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), 1.0, r"up: expected torch.float32 \[2, 3\] as gate"),
        (torch.zeros(2, 3), torch.zeros(2, 3).half(), 1.0, "up: expected torch.float32"),
        (torch.zeros(3), torch.zeros(3), 1.0, r"gate: expected float \[rows, width\]"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3).int(), 1.0, "gate: expected float"),
        (torch.zeros(2, 3), torch.zeros(2, 3), 0.0, "limit: expected a number above 0, found 0.0"),
        (torch.zeros(2, 3), torch.zeros(2, 3), float("nan"), "limit: expected a number above 0"),
    ],
)
def test_refuses(gate: torch.Tensor, up: torch.Tensor, limit: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clamped_swiglu(gate, up, limit)
