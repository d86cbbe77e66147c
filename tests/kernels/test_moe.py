"""Grouped mixture of experts against the row-by-row reference, and its activations by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels.moe import (
    Activation,
    ExpertWeights,
    Routing,
    first_linear,
    routed_experts,
    second_linear,
)
from sglang_ext.kernels.moe.reference import routed_experts_reference

HIDDEN, INNER = 7, 5


def experts_of(count: int, gated: bool = True, bias: bool = False) -> ExpertWeights:
    width = INNER * (2 if gated else 1)
    return ExpertWeights(
        torch.randn(count, width, HIDDEN),
        torch.randn(count, HIDDEN, INNER),
        torch.randn(count, width) if bias else None,
        torch.randn(count, HIDDEN) if bias else None,
    )


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 9),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 6),
    missing=st.sampled_from([0.0, 0.4, 1.0]),
    bias=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_grouped_equals_row_by_row(
    seed: int, rows: int, top_k: int, experts: int, missing: float, bias: bool
) -> None:
    torch.manual_seed(seed)
    weights = experts_of(experts, bias=bias)
    ids = torch.randint(0, experts, (rows, top_k))
    ids[torch.rand(rows, top_k) < missing] = -1
    routing = Routing(torch.rand(rows, top_k), ids.int())
    x = torch.randn(rows, HIDDEN)
    out = routed_experts(x, weights, routing, Activation())
    assert out.shape == x.shape
    inner, sums = first_linear(x, weights, routing, Activation())
    for block in (range(experts // 2), range(experts // 2, experts)):
        second_linear(inner, weights, block, sums)
    assert torch.equal(sums, out)
    torch.testing.assert_close(
        out, routed_experts_reference(x, weights, routing, Activation()), rtol=1e-4, atol=1e-4
    )


def test_experts_without_rows_are_never_read() -> None:
    weights = experts_of(3)
    weights.w13[1] = math.nan
    weights.w2[1] = math.nan
    routing = Routing(torch.ones(2, 2), torch.tensor([[0, -1], [2, 0]]))
    assert routed_experts(torch.randn(2, HIDDEN), weights, routing, Activation()).isfinite().all()


def test_bf16_stays_close_to_float32() -> None:
    torch.manual_seed(0)
    wide = experts_of(4)
    narrow = ExpertWeights(wide.w13.bfloat16(), wide.w2.bfloat16())
    routing = Routing(torch.rand(6, 2), torch.randint(0, 4, (6, 2)))
    x = torch.randn(6, HIDDEN).bfloat16()
    out = routed_experts(x, narrow, routing, Activation())
    assert out.dtype == torch.bfloat16
    expected = routed_experts_reference(x, narrow, routing, Activation())
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.1)


def test_weight_on_the_input_goes_through_the_activation() -> None:
    torch.manual_seed(1)
    weights = experts_of(3)
    ids, scale = torch.tensor([[0], [2], [-1]]), torch.rand(3, 1)
    x = torch.randn(3, HIDDEN)
    on_input = Routing(scale, ids, weigh_input=True)
    out = routed_experts(x, weights, on_input, Activation())
    torch.testing.assert_close(out, routed_experts_reference(x, weights, on_input, Activation()))
    by_hand = routed_experts(x * scale, weights, Routing(torch.ones(3, 1), ids), Activation())
    torch.testing.assert_close(out, by_hand)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clip(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


GATED = [
    (Activation(), lambda g, u: silu(g) * u),
    (Activation(clamp=0.5), lambda g, u: silu(min(g, 0.5)) * clip(u, 0.5)),
    (Activation(limit=0.5), lambda g, u: min(silu(g), 0.5) * clip(u, 0.5)),
    (
        Activation(alpha=1.7, limit=0.5),
        lambda g, u: min(g, 0.5) / (1 + math.exp(-1.7 * min(g, 0.5))) * (clip(u, 0.5) + 1),
    ),
    (Activation("gelu"), lambda g, u: gelu_tanh(g) * u),
    (Activation("gelu_tanh"), lambda g, u: gelu_tanh(g) * u),
    (Activation("situ"), lambda g, u: 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * u),
    (
        Activation("situ", alpha=2.0, limit=0.5),
        lambda g, u: 2 * math.tanh(g / 2) / (1 + math.exp(-g)) * 0.5 * math.tanh(u / 0.5),
    ),
]


@pytest.mark.parametrize(("activation", "formula"), GATED)
def test_gated_activation(activation: Activation, formula: object) -> None:
    gate, up = 2 * torch.randn(2, 3, 5).unbind(0)[0], 2 * torch.randn(3, 5)
    expected = torch.tensor(
        [
            [formula(g, u) for g, u in zip(gs, us, strict=True)]  # type: ignore[operator]
            for gs, us in zip(gate.tolist(), up.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(activation(torch.cat([gate, up], dim=-1)), expected)


def test_interleaved_gate_and_up() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    split = Activation(alpha=1.7, limit=0.5)(torch.cat([gate, up], dim=-1))
    mixed = torch.stack([gate, up], dim=-1).flatten(1)
    torch.testing.assert_close(Activation(alpha=1.7, limit=0.5, interleaved=True)(mixed), split)


def test_experts_without_a_gate() -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 5)
    torch.testing.assert_close(Activation("relu2", gated=False)(x), x.clamp(min=0) ** 2)
    torch.testing.assert_close(Activation("silu", gated=False)(x), x * x.sigmoid())
    erf = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    torch.testing.assert_close(Activation("gelu", gated=False)(x), erf)
    weights, relu2 = experts_of(3, gated=False), Activation("relu2", gated=False)
    routing = Routing(torch.rand(4, 2), torch.randint(0, 3, (4, 2)))
    rows = torch.randn(4, HIDDEN)
    torch.testing.assert_close(
        routed_experts(rows, weights, routing, relu2),
        routed_experts_reference(rows, weights, routing, relu2),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activation("swish"), "expected one of silu, gelu, gelu_tanh, situ .*'swish'"),
        (lambda: Activation("situ", gated=False), r"expected one of silu, gelu, relu2 .*'situ'"),
        (lambda: Activation(alpha=1.0), "limit: expected a number beside alpha"),
    ],
)
def test_unknown_activation_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("routing", "hidden", "message"),
    [
        (Routing(torch.ones(2, 1), torch.tensor([[0], [3]])), HIDDEN, "at most 2, .* found 3"),
        (Routing(torch.ones(2, 2), torch.zeros(2, 1).int()), HIDDEN, r"\[2, 1\] and \[2, 2\]"),
        (Routing(torch.ones(2, 1), torch.zeros(2, 1).int()), HIDDEN + 1, "w13 .*, 8"),
        (Routing(torch.ones(2, 2), torch.zeros(2, 2).int(), True), HIDDEN, "one expert per row"),
    ],
)
def test_what_does_not_fit_is_refused(routing: Routing, hidden: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        routed_experts(torch.randn(2, hidden), experts_of(3), routing, Activation())
