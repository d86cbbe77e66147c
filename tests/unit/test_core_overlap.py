"""Overlap schedules: order, hazards and a simulation, against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.batch_split import split_by_requests, split_by_tokens
from sglang_ext.core.overlap import (
    DECODE,
    DECODE_ROUTED,
    PREFILL,
    PREFILL_ROUTED,
    SEQUENTIAL,
    SINGLE,
    Issued,
    Op,
    Stages,
    Timed,
    exchanged,
    exposed,
    hazards,
    hidden_share,
    makespan,
    one_batch,
    simulate,
    trace_faults,
    two_batch,
)
from sglang_ext.core.overlap_run import Recorder, perform

relaxed = settings(deadline=None, max_examples=100)
ROUTED = ((PREFILL_ROUTED, 0), (DECODE_ROUTED, 2))
SCHEDULES = [
    one_batch(SEQUENTIAL, 2),
    one_batch(SINGLE, 2),
    two_batch(PREFILL, 3, 0),
    two_batch(DECODE, 3, 2),
    two_batch(PREFILL_ROUTED, 3, 0),
    two_batch(DECODE_ROUTED, 3, 2),
]


@pytest.mark.parametrize("requests", range(9))
def test_decode_halves(requests: int) -> None:
    got = split_by_requests(requests, rows_each=4)
    assert (got.requests, got.tokens, got.total) == (requests // 2, requests // 2 * 4, requests * 4)
    assert got.second == (requests - requests // 2) * 4


@relaxed
@given(st.lists(st.integers(1, 60), max_size=6), st.sampled_from([0.0, 0.3, 0.48, 0.5]))
def test_prefill_halves(lengths: list[int], threshold: float) -> None:
    got = split_by_tokens(lengths, threshold)
    total = sum(lengths)
    assert 0 <= got.tokens <= total == got.total
    cuts = [sum(lengths[:i]) for i in range(1, len(lengths))]
    if got.inside is None:
        assert got.tokens == sum(lengths[: got.requests])
    else:
        assert got.tokens == total // 2
        assert got.tokens == sum(lengths[: got.requests - 1]) + got.inside
        assert 0 < got.inside < lengths[got.requests - 1]
        assert all(min(c, total - c) < threshold * total for c in cuts)
    if cuts and threshold == 0:
        assert abs(2 * got.tokens - total) == min(abs(2 * c - total) for c in cuts)


def test_prefill_by_hand() -> None:
    assert split_by_tokens([10, 10]).tokens == 10
    cut = split_by_tokens([100, 2])
    assert (cut.requests, cut.tokens, cut.inside, cut.second) == (1, 51, 51, 51)
    assert split_by_tokens([100, 2], threshold=0).tokens == 100
    empty = split_by_tokens([1])
    assert (empty.requests, empty.tokens, empty.second) == (0, 0, 1)
    assert split_by_tokens([]).total == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_safe(schedule: list[Issued]) -> None:
    assert hazards(schedule) == []


@pytest.mark.parametrize(("stages", "delta"), [(PREFILL, 0), (DECODE, 2), (DECODE, 0), *ROUTED])
def test_both_halves_run_every_operation_in_order(stages: Stages, delta: int) -> None:
    schedule = two_batch(stages, 3, delta)
    for half in (0, 1):
        mine = [(i.layer, i.op) for i in schedule if i.half == half]
        assert mine == [(i.layer, i.op) for i in one_batch(stages, 3)]


def test_the_other_half_computes_while_rows_travel() -> None:
    layers = 4
    assert len(exposed(one_batch(SINGLE, layers))) == 3 * layers
    for stages, delta in ((PREFILL, 0), (DECODE, 2), *ROUTED):
        schedule = two_batch(stages, layers, delta)
        inner = [bare for bare in exposed(schedule) if 0 < bare[1] < layers - 1]
        assert inner == [], stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_moving_a_wait_or_dropping_an_operation_is_noticed(schedule: list[Issued]) -> None:
    for place, item in enumerate(schedule):
        without = schedule[:place] + schedule[place + 1 :]
        last = item.layer == max(i.layer for i in schedule) and item.op.name == "output"
        if not last:
            assert hazards(without), item
        if item.op.stream == "wait":
            same = [i for i in schedule[place + 1 :] if i.half == item.half]
            late = [*without[:place], *_move_after(without[place:], same[0], item)]
            if {"arrived", "routed"} & set(same[0].op.reads):
                assert hazards(late), item


def _move_after(rest: list[Issued], first: Issued, item: Issued) -> list[Issued]:
    place = rest.index(first)
    return [*rest[: place + 1], item, *rest[place + 1 :]]


def _brute_force(schedule: list[Issued], cost: dict[int, float]) -> float:
    """Longest path through the order of each stream, sends after compute, waits after sends."""
    end = [0.0] * len(schedule)
    for i, item in enumerate(schedule):
        before = [0.0]
        for j in range(i):
            other = schedule[j]
            if item.op.stream == "send":
                before.append(end[j])
                continue
            awaited = (other.half, other.op.transfer) == (item.half, item.op.transfer)
            if other.op.stream != "send" or (item.op.stream == "wait" and awaited):
                before.append(end[j])
        end[i] = max(before) + (0.0 if item.op.stream == "wait" else cost[i])
    return max(end)


@relaxed
@given(st.sampled_from(SCHEDULES), st.integers(0, 999))
def test_simulation_equals_the_longest_path(schedule: list[Issued], seed: int) -> None:
    draw = random.Random(seed)
    cost = {i: float(draw.randint(0, 9)) for i in range(len(schedule))}
    by_item = {id(item): cost[i] for i, item in enumerate(schedule)}
    times = simulate(schedule, lambda item: by_item[id(item)])
    assert makespan(times) == _brute_force(schedule, cost)
    assert trace_faults(times) == []
    assert 0.0 <= hidden_share(times) <= 1.0


def test_overlap_earns_what_it_hides() -> None:
    # 4 compute operations of 1 s and 2 transfers of 2 s per half and layer, 8 layers.
    def seconds(item: Issued) -> float:
        return 2.0 if item.op.stream == "send" else 1.0

    layers = 8
    one_after_another = 2 * makespan(simulate(one_batch(SEQUENTIAL, layers), seconds))
    overlapped = makespan(simulate(two_batch(PREFILL, layers, 0), seconds))
    assert one_after_another == 2 * layers * (5 + 4)
    assert overlapped < 0.65 * one_after_another
    assert hidden_share(simulate(one_batch(SEQUENTIAL, layers), seconds)) == 0.0


def test_a_wait_that_ends_before_its_transfer_is_a_fault() -> None:
    times = simulate(one_batch(SEQUENTIAL, 1), lambda _: 1.0)
    broken = [
        Timed(t.issued, t.start, t.start - 0.5) if t.issued.op.stream == "wait" else t
        for t in times
    ]
    assert any("not done" in fault for fault in trace_faults(broken))


@pytest.mark.parametrize(("parts", "shared"), [(1, False), (2, True), (3, True)])
def test_what_runs_is_the_schedule(parts: int, shared: bool) -> None:
    """Operations are called in order with what they read; a transfer's rows exist at its wait."""
    order = exchanged(parts, shared=shared)
    assert hazards([Issued(0, 0, op) for op in order], ("attended", "choices")) == []
    called: list[str] = []

    def compute(op: Op) -> object:
        called.append(op.name)
        made = tuple(f"{name} of {op.name} {op.part}" for name in op.writes)
        return made if len(made) > 1 else made[0]

    def send(op: Op) -> object:
        called.append(op.name)
        return lambda: called.append(f"wait for {op.transfer}") or "rows"

    steps = {}
    for op in order:
        if op.stream != "wait":
            make = send if op.stream == "send" else compute
            known = {o.part: o for o in order if o.name == op.name and o.stream == op.stream}
            steps[op.name] = lambda *given, known=known, make=make: make(
                known[given[0] if len(known) > 1 or None not in known else None]
            )
    buffers: dict[str, object] = {"attended": "x", "choices": "ids"}
    recorder = Recorder()
    perform(order, steps, buffers, recorder)
    assert called == [f"wait for {op.transfer}" if op.stream == "wait" else op.name for op in order]
    assert buffers["hidden"] == "hidden of output None"
    assert [t.issued.op for t in recorder.trace] == list(order)


@pytest.mark.parametrize("transfer", ["dispatch", "combine 0", "combine 1"])
def test_a_layer_without_a_wait_cannot_run(transfer: str) -> None:
    order = [op for op in exchanged(2) if (op.stream, op.transfer) != ("wait", transfer)]
    steps = {op.name: (lambda *_, op=op: _made(op)) for op in order if op.stream != "wait"}
    with pytest.raises(KeyError):
        perform(order, steps, {"attended": 0, "choices": 0})


def _made(op: Op) -> object:
    # By name alone: the parts write alike.
    if op.stream == "send":
        return lambda: 0
    return (0,) * len(op.writes) if len(op.writes) > 1 else 0


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="parts"):
        exchanged(0)
    with pytest.raises(ValueError, match="threshold"):
        split_by_tokens([1], 0.6)
    with pytest.raises(ValueError, match="delta"):
        two_batch(PREFILL, 1, 9)
