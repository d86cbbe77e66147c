"""Target law, inverse-CDF draws and seeded draws against definitions written out in Python."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.core.spec import sampling
from sglang_ext.core.spec.noise import gumbel, vocabulary_columns
from sglang_ext.core.spec.sampling import (
    TOP_K_ALL,
    SamplingRows,
    draw,
    seeded_sample,
    target_probs,
)
from sglang_ext.core.spec.types import VerifyPlan

FILTERS = list(itertools.product([0.5, 1.0, 1.7], [-1, 5], [1.0, 0.8], [0.0, 0.1]))


def law(logits: Tensor, t: float, k: int, p: float, m: float) -> list[float]:
    """The filtered law of one row, token by token."""
    probs = torch.softmax(logits.double() / t, dim=-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept, ahead = {}, 0.0
    for rank, i in enumerate(order):
        inside = rank < (len(probs) if k in (-1, TOP_K_ALL) else k)
        if inside and ahead <= p and probs[i] >= m * probs[order[0]]:
            kept[i] = probs[i]
        ahead += probs[i]
    mass = sum(kept.values())
    return [kept.get(i, 0.0) / mass for i in range(len(probs))]


@pytest.mark.parametrize("params", FILTERS)
def test_each_filter_combination_gives_the_law_of_its_definition(
    params: tuple[float, int, float, float],
) -> None:
    logits = torch.randn(7, 53, generator=torch.Generator().manual_seed(1)) * 2
    t, k, p, m = ([value] * 7 for value in params)
    got = target_probs(logits, SamplingRows.of(t, k, p, m))
    expected = torch.tensor([law(row, *params) for row in logits])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = torch.randn(len(FILTERS), 61, generator=torch.Generator().manual_seed(2))
    got = target_probs(logits, SamplingRows.of(*zip(*FILTERS, strict=True)))
    for r, params in enumerate(FILTERS):
        alone = target_probs(logits[r : r + 1], SamplingRows.of(*([x] for x in params)))
        torch.testing.assert_close(got[r : r + 1], alone, atol=0, rtol=1e-6)


@pytest.mark.parametrize("sharp", [6.0, 0.3], ids=["narrow-nucleus", "wide-nucleus"])
def test_a_nucleus_from_the_leading_tokens_equals_one_from_a_full_sort(sharp: float) -> None:
    logits = torch.randn(3, 9001, generator=torch.Generator().manual_seed(3)) * sharp
    rows = SamplingRows.of([1.0] * 3, [-1, 300, -1], [0.9, 1.0, 0.99])
    got = target_probs(logits, rows)
    ordered, order = torch.softmax(logits, -1).sort(dim=-1, descending=True)
    weights = sampling._ranked_weights(ordered, rows)
    expected = torch.zeros_like(logits).scatter_(1, order, weights)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected / expected.sum(-1, keepdim=True))


def test_top_k_one_is_the_argmax() -> None:
    logits = torch.randn(5, 17)
    probs = target_probs(logits, SamplingRows.of([1.0] * 5, [1] * 5))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert (probs.amax(-1) == 1.0).all()


def test_a_token_banned_by_minus_infinity_has_no_mass() -> None:
    logits = torch.zeros(1, 5)
    logits[0, 2] = float("-inf")
    assert target_probs(logits, SamplingRows.of([2.0], min_p=[0.1]))[0, 2] == 0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("temperature", {"temperature": [0.0]}),
        ("top_k", {"temperature": [1.0], "top_k": [0]}),
        ("top_p", {"temperature": [1.0], "top_p": [1.5]}),
        ("min_p", {"temperature": [1.0], "min_p": [-0.1]}),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, arguments: dict[str, list]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        SamplingRows.of(**arguments)


def test_parameters_are_repeated_for_ragged_rows() -> None:
    rows = SamplingRows.of([0.5, 2.0], [3, -1]).for_rows(VerifyPlan.of([2, 0]))
    assert rows.temperature == (0.5, 0.5, 0.5, 2.0)
    assert rows.top_k == (3, 3, 3, TOP_K_ALL)


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.25, 1.0, 3.0]), min_size=1, max_size=12),
    st.sampled_from([0.0, 5e-324, 0.25, 0.5, 1 - 2**-24, 1 - 2**-53]),
)
def test_a_draw_never_lands_on_an_empty_column(weights: list[float], coin: float) -> None:
    if not any(weights):
        return
    got = int(draw(torch.tensor([weights]), torch.tensor([coin], dtype=torch.float64)))
    assert weights[got] > 0


def test_a_draw_inverts_the_cumulated_weights() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0]])
    for coin, column in ((0.0, 1), (0.49, 1), (0.5, 3), (0.74, 3), (0.75, 4), (0.999, 4)):
        assert int(draw(weights, torch.tensor([coin]))) == column


def seeded_oracle(
    logits: Tensor, params: tuple[float, int, float, float], seed: int, position: int
) -> int:
    """Gumbel-max by id without filters, by rank with filters; one row."""
    probs = torch.softmax(logits / params[0], dim=-1)
    noise = gumbel(
        torch.tensor([seed]),
        torch.tensor([position]),
        vocabulary_columns(len(logits), torch.device("cpu")),
    )[0]
    if params[1:] == (-1, 1.0, 0.0):
        return max(range(len(probs)), key=lambda i: float(probs[i].log().double() + noise[i]))
    kept = law(logits, *params)
    order = sorted(range(len(kept)), key=lambda i: -float(probs[i]))
    alive = [(rank, i) for rank, i in enumerate(order) if kept[i] > 0]
    return max(alive, key=lambda at: float(probs[at[1]].double().log() + noise[at[0]]))[1]


def test_seeded_draws_equal_the_definition_in_a_mixed_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(FILTERS), 47, generator=generator) * 2
    seeds = torch.randint(0, 2**31, (len(FILTERS),), generator=generator)
    positions = torch.arange(len(FILTERS)) + 100
    got = seeded_sample(logits, SamplingRows.of(*zip(*FILTERS, strict=True)), seeds, positions)
    expected = [
        seeded_oracle(logits[r], params, int(seeds[r]), int(positions[r]))
        for r, params in enumerate(FILTERS)
    ]
    assert got.tolist() == expected


def test_seeded_draws_over_a_reduced_vocabulary_use_the_noise_of_the_target_ids() -> None:
    ids = torch.tensor([3, 5, 11, 12, 30])
    logits = torch.full((6, 31), float("-inf"))
    logits[:, ids] = torch.randn(6, 5, generator=torch.Generator().manual_seed(5))
    rows, seeds, positions = SamplingRows.of([0.9] * 6), torch.arange(6), torch.arange(6) + 9
    whole = seeded_sample(logits, rows, seeds, positions)
    part = seeded_sample(logits[:, ids], rows, seeds, positions, ids)
    assert torch.equal(ids[part], whole)


@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "many-ties"])
def test_seeded_draws_from_the_leading_tokens_equal_those_from_a_full_sort(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(60, 9001, generator=torch.Generator().manual_seed(8)) * 3
    if step:
        logits = (logits / step).round() * step
    n = 20
    rows = SamplingRows.of([1.0] * 60, [-1] * n + [7] * n + [300] * n, [0.9] * n + [1.0] * 2 * n)
    seeds, positions = torch.arange(60), torch.arange(60) * 3
    got = seeded_sample(logits, rows, seeds, positions)
    monkeypatch.setattr(sampling, "_leading", lambda p, *_, **__: p.sort(dim=-1, descending=True))
    assert torch.equal(got, seeded_sample(logits, rows, seeds, positions))


def test_candidate_lists_that_differ_by_row_use_the_noise_of_their_ids() -> None:
    ids = torch.tensor([[3, 5, 11], [30, 12, 4]])
    generator = torch.Generator().manual_seed(6)
    logits = torch.full((2, 31), float("-inf"))
    part = torch.randn(2, 3, generator=generator)
    logits.scatter_(1, ids, part)
    rows, seeds, positions = SamplingRows.of([1.0] * 2), torch.tensor([1, 2]), torch.tensor([7, 8])
    drawn = seeded_sample(part, rows, seeds, positions, ids)
    whole = seeded_sample(logits, rows, seeds, positions)
    assert torch.equal(ids.gather(1, drawn[:, None]).squeeze(1), whole)
