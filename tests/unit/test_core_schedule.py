"""Algorithm 1, its asynchronous variant and the speed tables."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core.spec.errors import TableError
from sglang_ext.core.spec.schedule import (
    LaggedScheduler,
    admit,
    capacity,
    schedule_prefixes,
    throughput,
)
from sglang_ext.core.spec.sps import AdditiveTable, SpsTable, load_table


def sps(*rates: float) -> SpsTable:
    return SpsTable(tuple(range(1, len(rates) + 1)), tuple(rates), len(rates))


def prefix_survivals(*conditional: float) -> np.ndarray:
    return np.cumprod(np.array([conditional]), axis=1)


EXAMPLE = sps(1000, 520, 400, 340, 280)


def test_the_worked_example_keeps_three_drafts() -> None:
    survivals = prefix_survivals(0.95, 0.92, 0.85, 0.30)
    theta = throughput(survivals[0], 1, EXAMPLE)
    np.testing.assert_allclose(theta, [1000, 1014, 1129.6, 1212.746, 1061.1356], rtol=1e-12)
    assert schedule_prefixes(survivals, EXAMPLE) == [3]


def test_no_table_verifies_everything() -> None:
    assert schedule_prefixes(np.full((3, 5), 0.1), None) == [5, 5, 5]
    assert schedule_prefixes(np.full((3, 5), 0.1), None, caps=[5, 0, 2]) == [5, 0, 2]


def test_the_time_of_the_draft_makes_longer_verifications_worth_while() -> None:
    survivals = prefix_survivals(0.5, 0.5)
    table = SpsTable.from_seconds({1: 1.0, 2: 1.6, 3: 2.2})
    assert schedule_prefixes(survivals, table) == [0]
    assert schedule_prefixes(survivals, table, draft_seconds=1.0) == [1]


COUNTER_EXAMPLE = sps(1.0, 0.5, 0.45)
P_A, Q_A = Fraction(7, 10), Fraction(5, 10)


def law_of_a(lengths: dict[str, int]) -> Fraction:
    """Exact probability that the first committed token is A, given the length for each draft."""
    p = {"A": P_A, "B": 1 - P_A}
    q = {"A": Q_A, "B": 1 - Q_A}
    residual = {x: max(p[x] - q[x], Fraction(0)) for x in p}
    mass = sum(residual.values())
    total = Fraction(0)
    for x in p:
        if lengths[x] == 0:
            total += q[x] * p["A"]
            continue
        accept = min(Fraction(1), p[x] / q[x])
        total += q[x] * accept * (x == "A")
        total += q[x] * (1 - accept) * residual["A"] / mass
    return total


def test_early_stop_is_lossless_where_the_best_theta_is_not() -> None:
    survivals = {"A": prefix_survivals(0.8, 0.9), "B": prefix_survivals(0.8, 0.0)}
    stopped = {x: schedule_prefixes(a, COUNTER_EXAMPLE)[0] for x, a in survivals.items()}
    best = {x: int(throughput(a[0], 1, COUNTER_EXAMPLE).argmax()) for x, a in survivals.items()}
    np.testing.assert_allclose(throughput(survivals["A"][0], 1, COUNTER_EXAMPLE), [1, 0.9, 1.134])
    np.testing.assert_allclose(throughput(survivals["B"][0], 1, COUNTER_EXAMPLE), [1, 0.9, 0.81])
    assert stopped == {"A": 0, "B": 0}
    assert best == {"A": 2, "B": 0}
    assert law_of_a(stopped) == P_A
    assert law_of_a(best) == Fraction(85, 100)


CONDITIONAL = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, SpsTable]:
    requests, gamma = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    shape = st.lists(
        st.lists(CONDITIONAL, min_size=gamma, max_size=gamma), min_size=requests, max_size=requests
    )
    survivals = np.cumprod(np.array(draw(shape)), axis=1)
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True))
    rates = draw(
        st.lists(
            st.sampled_from([1.0, 0.97, 0.9, 0.8, 0.5]), min_size=len(sizes), max_size=len(sizes)
        )
    )
    return survivals, SpsTable(tuple(sorted(sizes)), tuple(rates), 30)


def rate(table: SpsTable, tokens: int) -> float:
    below = [i for i, b in enumerate(table.sample_batch_tokens) if b <= tokens]
    return table.sample_steps_per_sec[below[-1] if below else 0]


def ranked(survivals: np.ndarray) -> list[tuple[float, int, int]]:
    requests, gamma = survivals.shape
    pool = [(-survivals[r, j], j, r) for r in range(requests) for j in range(gamma)]
    return sorted(item for item in pool if item[0] < 0)


def brute_force(survivals: np.ndarray, table: SpsTable) -> list[int]:
    """Algorithm 1 as the paper prints it."""
    requests = survivals.shape[0]
    lengths = [0] * requests
    batch, tau = requests, float(requests)
    best = tau * rate(table, batch)
    for minus, j, r in ranked(survivals):
        batch += 1
        tau -= minus
        theta = tau * rate(table, batch)
        if theta <= best * (1 + 1e-12):
            break
        best, lengths[r] = theta, j + 1
    return lengths


def margin(survivals: np.ndarray, table: SpsTable) -> float:
    """Smallest relative step of Theta: below rounding, two sound orders of summation differ."""
    gains = np.array([-item[0] for item in ranked(survivals)])
    theta = throughput(gains, survivals.shape[0], table)
    return float(np.abs(np.diff(theta) / theta[:-1]).min(initial=1.0))


@given(problems())
def test_lengths_equal_the_printed_algorithm(problem: tuple[np.ndarray, SpsTable]) -> None:
    survivals, table = problem
    if margin(survivals, table) > 1e-9:
        assert schedule_prefixes(survivals, table) == brute_force(survivals, table)


@given(problems(), st.integers(0, 25))
def test_admission_takes_the_likeliest_prefixes(
    problem: tuple[np.ndarray, SpsTable], budget: int
) -> None:
    survivals, _ = problem
    lengths = admit(survivals, budget)
    expected = [0] * len(survivals)
    for _, j, r in ranked(survivals)[:budget]:
        expected[r] = max(expected[r], j + 1)
    assert lengths == expected
    assert sum(lengths) == min(budget, int((survivals > 0).sum()))


@given(problems(), st.data())
def test_whether_a_draft_is_verified_does_not_depend_on_what_follows_it(
    problem: tuple[np.ndarray, SpsTable], data: st.DataObject
) -> None:
    survivals, table = problem
    r = data.draw(st.integers(0, survivals.shape[0] - 1))
    k = data.draw(st.integers(1, survivals.shape[1]))
    changed = survivals.copy()
    tail = [data.draw(CONDITIONAL) for _ in range(survivals.shape[1] - k)]
    changed[r, k:] = survivals[r, k - 1] * np.cumprod([1.0, *tail])[1:]
    budget = data.draw(st.integers(0, survivals.size))
    for plan in (lambda a: schedule_prefixes(a, table), lambda a: admit(a, budget)):
        assert (plan(survivals)[r] >= k) == (plan(changed)[r] >= k)


@given(problems())
def test_capacity_is_the_best_of_the_whole_list(problem: tuple[np.ndarray, SpsTable]) -> None:
    survivals, table = problem
    gains = [-item[0] for item in ranked(survivals)]
    requests = len(survivals)
    theta = [(requests + sum(gains[:m])) * rate(table, requests + m) for m in range(len(gains) + 1)]
    assert theta[capacity(survivals, table)] == pytest.approx(max(theta))


@given(problems(), st.data())
def test_caps_are_the_same_as_no_survival_beyond_them(
    problem: tuple[np.ndarray, SpsTable], data: st.DataObject
) -> None:
    survivals, table = problem
    caps = [data.draw(st.integers(0, survivals.shape[1])) for _ in survivals]
    cut = np.where(np.arange(survivals.shape[1]) >= np.array(caps)[:, None], 0.0, survivals)
    assert schedule_prefixes(survivals, table, caps=caps) == schedule_prefixes(cut, table)
    assert admit(survivals, 4, caps) == admit(cut, 4)


def test_the_capacity_follows_confidences_of_two_rounds_ago() -> None:
    table = sps(10, 9, 5, 1)
    high, low = prefix_survivals(0.9, 0.9, 0.9), prefix_survivals(0.05, 0.05, 0.05)
    scheduler = LaggedScheduler(table, lag=2)
    fresh = capacity(np.ones((1, 3)), table)
    lengths = [scheduler.plan(["a"], a)[0] for a in (low, high, high, low)]
    # Rounds 0 and 1 have no history that old and count as certain.
    assert lengths == [fresh, fresh, capacity(low, table), capacity(high, table)]
    assert capacity(low, table) < fresh


def test_a_new_request_counts_as_certain_and_a_changed_gamma_as_new() -> None:
    scheduler = LaggedScheduler(sps(10, 9, 8.5, 8, 7.8, 7.6, 7.5), lag=1)
    scheduler.plan(["a"], prefix_survivals(0.0, 0.0))
    both = np.vstack((prefix_survivals(0.5, 0.5), prefix_survivals(0.9, 0.9)))
    history = np.array([[0.0, 0.0], [1.0, 1.0]])
    budget = capacity(history, scheduler.table)
    assert scheduler.plan(["a", "b"], both) == admit(both, budget)
    assert sum(scheduler.plan(["a"], prefix_survivals(0.9, 0.9, 0.9))) == 3


def test_no_table_verifies_everything_asynchronously() -> None:
    assert LaggedScheduler(None).plan(["a"], prefix_survivals(0.1, 0.1), caps=[1]) == [1]


def test_lookup_takes_the_sample_below() -> None:
    table = SpsTable((2, 4, 8), (10.0, 5.0, 2.0), 16)
    np.testing.assert_allclose(1 / table.seconds(1, 12), [10, 10, 10, 5, 5, 5, 5, 2, 2, 2, 2, 2])
    np.testing.assert_allclose(1 / table.seconds(9, 11), [2, 2, 2])


def test_the_additive_table_interpolates_both_axes_and_clamps() -> None:
    table = AdditiveTable(1.0, (1, 3), (0.0, 2.0), (2, 4), (0.5, 1.5))
    np.testing.assert_allclose(table.seconds(2, 5), [2.5, 3.0, 3.5, 3.5])
    np.testing.assert_allclose(table.seconds(9, 9), [4.5])


def test_a_measured_table_is_filled_in_and_never_speeds_up() -> None:
    table = SpsTable.from_seconds({1: 1.0, 3: 2.0, 5: 1.8})
    np.testing.assert_allclose(table.seconds(1, 5), [1.0, 1.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    "table",
    [SpsTable((1, 8), (10.0, 5.0), 16), AdditiveTable(1.0, (1,), (0.0,), (2, 4), (0.5, 1.5))],
    ids=["sampled", "additive"],
)
def test_tables_survive_a_round_trip(table: SpsTable | AdditiveTable, tmp_path: Path) -> None:
    table.save(tmp_path / "t.json")
    assert load_table(tmp_path / "t.json") == table


GOOD = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [10.0, 5.0], "max_batch_tokens": 8}
ADDITIVE = {
    "bias_seconds": 1.0,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": [1],
    "theta_seconds": [0.0],
}


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("sample_batch_tokens", {**GOOD, "sample_batch_tokens": [8, 1]}),
        ("sample_batch_tokens", {**GOOD, "sample_batch_tokens": []}),
        ("sample_batch_tokens", {**GOOD, "sample_batch_tokens": [1.5, 8]}),
        ("sample_steps_per_sec", {**GOOD, "sample_steps_per_sec": [10.0]}),
        ("sample_steps_per_sec", {**GOOD, "sample_steps_per_sec": [10.0, 0]}),
        ("sample_steps_per_sec", {**GOOD, "sample_steps_per_sec": [10.0, float("nan")]}),
        ("sample_steps_per_sec", {k: v for k, v in GOOD.items() if k != "sample_steps_per_sec"}),
        ("max_batch_tokens", {**GOOD, "max_batch_tokens": 7}),
        ("max_batch_tokens", {**GOOD, "max_batch_tokens": "8"}),
        ("sps", {**GOOD, "sps": 1}),
        ("bias_seconds", {**ADDITIVE, "bias_seconds": 0}),
        ("m_probes", {**ADDITIVE, "m_probes": [0]}),
        ("theta_seconds", {**ADDITIVE, "theta_seconds": [0.0, 1.0]}),
        ("file", []),
    ],
)
def test_a_bad_table_is_refused_by_field(field: str, content: object, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=rf"SPS table, {field}: expected .* found .*\. \w"):
        load_table(path)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="file"):
        load_table(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"sample_batch')
    with pytest.raises(TableError, match="file"):
        load_table(tmp_path / "cut.json")
