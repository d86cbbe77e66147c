"""Routers against a loop with Python's sort; ties, groups and hashes by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sglang_ext.core.router import clamped_swiglu, top_k_stable
from sglang_ext.kernels.router import route_grouped_sigmoid, route_hash, route_sqrtsoftplus
from sglang_ext.kernels.router.reference import (
    route_grouped_sigmoid_reference,
    route_hash_reference,
    route_sqrtsoftplus_reference,
)
from tests.kernels.backend import Backend

pytestmark = pytest.mark.usefixtures("poisoned")


def _logits(tokens: int, experts: int, *, rounded: bool) -> tuple[Tensor, Tensor]:
    """Rounded values make ties; wide ones reach where softplus underflows."""
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    logits = 5 * torch.randn(tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator)
    return (logits.round(), (bias * 2).round() / 8) if rounded else (4 * logits, bias)


def _same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[0].dtype == torch.int64
    assert found[1].dtype == torch.float32
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rounded", [True, False], ids=["ties", "wide"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(7, 37, 5), (0, 8, 2), (3, 256, 6), (2, 384, 6), (1, 3, 3)],
)
def test_sqrtsoftplus(
    tokens: int, experts: int, top_k: int, rounded: bool, backend: Backend
) -> None:
    logits, bias = _logits(tokens, experts, rounded=rounded)
    options = {"top_k": top_k, "scaling": 1.5}
    found = route_sqrtsoftplus(
        backend.place(logits), backend.place(bias), **options,
        implementation=backend.implementation,
    )  # fmt: skip
    _same(found, route_sqrtsoftplus_reference(logits, bias, **options))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "dtype"),
    [(7, 37, 5, torch.int32), (0, 8, 2, torch.int64), (3, 256, 6, torch.int64)],
)
def test_hash(tokens: int, experts: int, top_k: int, dtype: torch.dtype, backend: Backend) -> None:
    logits, _ = _logits(tokens, experts, rounded=False)
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, experts, (53, top_k), generator=generator).to(dtype)
    tokens_ids = torch.randint(0, 53, (tokens,), generator=generator)
    placed = [backend.place(x) for x in (logits, tokens_ids, table)]
    found = route_hash(*placed, scaling=1.5, implementation=backend.implementation)
    _same(found, route_hash_reference(logits, tokens_ids, table, scaling=1.5))


@pytest.mark.parametrize("rounded", [True, False], ids=["ties", "wide"])
@pytest.mark.parametrize(
    ("tokens", "experts", "n_group", "topk_group", "top_k"),
    [(7, 36, 4, 2, 5), (5, 35, 5, 3, 7), (3, 256, 8, 4, 8), (0, 8, 2, 1, 2), (2, 6, 1, 1, 6)],
)
def test_grouped_sigmoid(
    tokens: int,
    experts: int,
    n_group: int,
    topk_group: int,
    top_k: int,
    rounded: bool,
    backend: Backend,
) -> None:
    logits, bias = _logits(tokens, experts, rounded=rounded)
    # Every biased score is negative: an expert of a group that is out must still not win.
    bias = bias - 4
    options = {"n_group": n_group, "topk_group": topk_group, "top_k": top_k, "scaling": 2.5}
    found = route_grouped_sigmoid(
        backend.place(logits), backend.place(bias), **options,
        implementation=backend.implementation,
    )  # fmt: skip
    _same(found, route_grouped_sigmoid_reference(logits, bias, **options))


def test_equal_scores_take_the_lowest_experts(backend: Backend) -> None:
    logits, bias = torch.zeros(3, 200), torch.zeros(200)
    bias[150] = 0.5
    placed = (backend.place(logits), backend.place(bias))
    found = route_sqrtsoftplus(*placed, top_k=4, scaling=1.5, implementation=backend.implementation)
    assert found.ids.tolist() == [[150, 0, 1, 2]] * 3
    # The bias moved the selection only: all four weigh the same.
    torch.testing.assert_close(found.weights.cpu(), torch.full((3, 4), 1.5 / 4))
    grouped = route_grouped_sigmoid(
        *placed, n_group=10, topk_group=2, top_k=4, scaling=1.0,
        implementation=backend.implementation,
    )  # fmt: skip
    # Expert 150 lifts group 7 (140..159); group 0 is the lowest of the rest.
    assert grouped.ids.tolist() == [[150, 0, 1, 2]] * 3


def test_a_very_negative_logit_keeps_its_size(backend: Backend) -> None:
    """sqrt(softplus(-30)) = e^-15: a softplus that loses log1p would call it 0."""
    logits = torch.tensor([[-30.0, -32.0]])
    found = route_sqrtsoftplus(
        backend.place(logits), backend.place(torch.zeros(2)), top_k=2, scaling=1.0,
        implementation=backend.implementation,
    )  # fmt: skip
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(
        found.weights.cpu(), torch.tensor([[share, 1 - share]]), rtol=1e-5, atol=0
    )


def test_stable_top_k_is_the_same_for_one_row_and_many() -> None:
    scores = torch.randint(0, 3, (100, 300), generator=torch.Generator().manual_seed(0)).float()
    together = top_k_stable(scores, 50)
    alone = torch.cat([top_k_stable(row.unsqueeze(0), 50) for row in scores])
    assert torch.equal(together, alone)
    assert (
        together[:, :-1][scores.gather(1, together).diff() == 0]
        < together[:, 1:][scores.gather(1, together).diff() == 0]
    ).all()


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([20.0, -20.0, 1.0]), torch.tensor([20.0, -20.0, 0.5])
    found = clamped_swiglu(gate, up, 10.0)
    silu = [x / (1 + math.exp(-x)) for x in (10.0, -20.0, 1.0)]
    expected = torch.tensor([silu[0] * 10, silu[1] * -10, silu[2] * 0.5])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(7)}, r"bias: expected float \[8\], found torch.float32 \[7\]"),
        ({"n_group": 3}, "n_group: expected a divisor of 8"),
        ({"n_group": 8}, "leaves two in a group, found 8"),
        ({"topk_group": 5}, "topk_group: expected 1 to 4, found 5"),
        ({"top_k": 5}, "top_k: expected 1 to 4, found 5"),
        ({"logits": torch.zeros(3, 8).long()}, "logits: expected float"),
    ],
)
def test_grouped_refuses(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "logits": torch.zeros(3, 8), "bias": torch.zeros(8), "n_group": 4, "topk_group": 2,
        "top_k": 2, "scaling": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        route_grouped_sigmoid(**{**arguments, **change})  # type: ignore[arg-type]


def test_hash_refuses_ids_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"token_ids: expected int \[3\], found torch.int64 \[2\]"):
        route_hash(torch.zeros(3, 8), torch.zeros(2).long(), torch.zeros(5, 2).long(), scaling=1.0)
