"""The checker's statistics against closed forms, scipy and simulation."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from sglang_ext.lossless.sampled import conditional, family
from sglang_ext.lossless.statistics import LEAST_IN_CELL, Homogeneity, holm, homogeneity

COUNTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=2, max_size=9)


@given(COUNTS)
def test_equals_scipy_where_no_cell_is_rare(pairs: list[tuple[int, int]]) -> None:
    pairs = [(a + LEAST_IN_CELL, b) for a, b in pairs]
    left = Counter({i: a for i, (a, _) in enumerate(pairs)})
    right = Counter({i: b for i, (_, b) in enumerate(pairs) if b})
    if not right:
        return
    found = homogeneity(left, right)
    table = np.array(pairs).T
    wanted = chi2_contingency(table, correction=False)
    assert found.statistic == pytest.approx(wanted.statistic, rel=1e-9, abs=1e-9)
    assert found.freedom == wanted.dof
    assert found.p_value == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)


@given(COUNTS)
def test_pooling_keeps_every_observation(pairs: list[tuple[int, int]]) -> None:
    left = Counter({i: a for i, (a, _) in enumerate(pairs)})
    right = Counter({i: b for i, (_, b) in enumerate(pairs)})
    found = homogeneity(left, right)
    assert (found.left, found.right) == (left.total(), right.total())
    assert found.statistic >= 0.0


def test_nothing_to_compare() -> None:
    assert homogeneity(Counter(), Counter({1: 50})).p_value == 1.0
    assert homogeneity(Counter({1: 50}), Counter({1: 60})).freedom == 0


def test_holm_on_the_textbook_example() -> None:
    # Ordered thresholds at alpha 0.05: .0125, .0167, .025, .05.
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_is_between_bonferroni_and_none(values: list[float]) -> None:
    rejected = holm(values, 0.05)
    for p, bad in zip(values, rejected, strict=True):
        assert bad or p > 0.05 / len(values)
        assert not bad or p <= 0.05


def _draws(rng: random.Random, law: list[float], count: int) -> Counter[object]:
    return Counter(rng.choices(range(len(law)), law, k=count))


def test_false_alarms_are_as_rare_as_stated() -> None:
    rng = random.Random(1)
    law = [0.5, 0.2, 0.1, 0.1, 0.05, 0.05]
    low = sum(
        homogeneity(_draws(rng, law, 300), _draws(rng, law, 300)).p_value < 0.05 for _ in range(600)
    )
    # Binomial(600, 0.05): beyond 50 with a chance of 1e-4.
    assert low < 50


@pytest.mark.parametrize("power", [0.8, 0.95])
def test_the_stated_distance_is_seen(power: float) -> None:
    """Any two laws at the stated distance are told apart as often as stated."""
    rng = random.Random(2)
    count, level = 500, 1e-3
    laws = [[0.25] * 4, [0.85, 0.05, 0.05, 0.05]]
    for law in laws:
        distance = Homogeneity(0.0, 3, count, count).visible_distance(level, power)
        other = [law[0] - distance, law[1] + distance, *law[2:]]
        assert min(other) >= 0
        runs = 300
        seen = sum(
            homogeneity(_draws(rng, law, count), _draws(rng, other, count)).p_value < level
            for _ in range(runs)
        )
        # Four standard deviations of the count of successes.
        assert seen / runs > power - 4 * (power * (1 - power) / runs) ** 0.5


@settings(max_examples=20)
@given(st.integers(1, 10**6))
def test_more_draws_see_smaller_distances(count: int) -> None:
    few = Homogeneity(0.0, 5, count, count).visible_distance(0.01, 0.8)
    many = Homogeneity(0.0, 5, 2 * count, 2 * count).visible_distance(0.01, 0.8)
    assert 0 < many <= few <= 1


def _chain(rng: random.Random, stay: float, count: int) -> list[tuple[int, ...]]:
    """Texts of two tokens; the second repeats the first with chance `stay`."""
    texts = []
    for _ in range(count):
        first = rng.randrange(2)
        texts.append((first, first if rng.random() < stay else 1 - first))
    return texts


def test_a_difference_in_the_conditional_law_is_seen() -> None:
    """Both tokens have the same marginal law on both sides; only their relation differs."""
    rng = random.Random(3)
    base, spec = _chain(rng, 0.8, 400), _chain(rng, 0.2, 400)
    marginal = homogeneity(Counter(t[1] for t in base), Counter(t[1] for t in spec))
    assert marginal.p_value > 1e-3
    assert conditional(base, spec, 1).p_value < 1e-20
    assert conditional(base, spec, 0).p_value > 1e-3


def test_small_differences_shared_by_prompts_add_up() -> None:
    rng = random.Random(4)
    names = [f"p{n}" for n in range(12)]
    base = {name: _chain(rng, 0.60, 300) for name in names}
    spec = {name: _chain(rng, 0.50, 300) for name in names}
    tests = {(t.prompt, t.position): t.found.p_value for t in family(base, spec, 2)}
    alone = min(tests[name, 1] for name in names)
    assert tests["all prompts", 1] < alone
    assert tests["all prompts", 1] < 1e-4


def test_a_text_that_ends_early_is_a_token_of_its_own() -> None:
    base, spec = [(1, 2)] * 100, [(1,)] * 100
    assert conditional(base, spec, 1).p_value < 1e-20
