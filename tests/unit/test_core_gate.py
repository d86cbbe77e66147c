"""Drafting stops where it lost time, is tried again, and never looks at the round it decides."""

from __future__ import annotations

from sglang_ext.core.spec.gate import DraftGate, RoundTimes

# Plain decoding makes 1 token in 10 ms; a drafted round costs 20 ms.
TIMES = RoundTimes(decode=10.0, draft=5.0, verify=15.0)


def rounds(gate: DraftGate, committed: int, count: int) -> list[bool]:
    """Decisions of `count` rounds in which a drafted round commits `committed` tokens."""
    decisions = []
    for _ in range(count):
        drafted = gate.drafts(["a"], TIMES)
        decisions.append(drafted)
        if drafted:
            gate.record(["a"], [committed], [8])
    return decisions


def test_a_draft_that_pays_is_kept() -> None:
    assert all(rounds(DraftGate(), committed=3, count=200))


def test_break_even_is_decided_by_the_margin() -> None:
    assert all(rounds(DraftGate(margin=0.02, trial=4), committed=2, count=20))
    assert not all(rounds(DraftGate(margin=-0.02, trial=4), committed=2, count=20))


def test_a_draft_that_loses_is_stopped_and_probed_ever_less_often() -> None:
    gate = DraftGate(trial=4, probe=4, probe_every=10)
    decisions = rounds(gate, committed=1, count=800)
    assert decisions[:4] == [True] * 4
    assert not any(decisions[4:14])
    assert decisions[14:18] == [True] * 4
    assert not any(decisions[18:38])
    assert decisions[38:42] == [True] * 4
    probes = sum(decisions[4:])
    assert probes <= 0.1 * len(decisions)
    # The longest pause is bounded, so a change of content is noticed.
    longest = max(len(run) for run in "".join("x" if d else "." for d in decisions).split("x"))
    assert longest == 80


def test_a_probe_finds_a_draft_that_has_become_good() -> None:
    gate = DraftGate(trial=4, probe=4, probe_every=10, memory=0.8)
    assert not all(rounds(gate, committed=1, count=10))
    assert all(rounds(gate, committed=6, count=200)[-50:])


def test_batch_sizes_are_judged_apart() -> None:
    gate = DraftGate(trial=2, probe=2, probe_every=10)
    assert not rounds(gate, committed=1, count=5)[-1]
    assert gate.drafts(["a", "b", "c"], TIMES)


def test_a_request_better_than_its_neighbours_keeps_the_draft() -> None:
    gate = DraftGate(memory=0.5, trial=2, probe=2)
    for _ in range(20):
        gate.record(["good"], [4], [8])
        gate.record(["bad"], [1], [8])
    assert gate.drafts(["good"], TIMES)
    assert not gate.drafts(["bad"], TIMES)
    gate.forget(["bad"])
    assert gate.drafts(["bad"], TIMES)


def test_rows_to_foresee_follow_the_verifications_seen() -> None:
    gate = DraftGate()
    assert gate.expected_rows(4) == 4
    for _ in range(50):
        gate.record(["a", "b", "c", "d"], [2, 2, 1, 1], [4, 4, 2, 2])
    assert gate.expected_rows(4) == 12
    assert gate.expected_rows(3) == 9
    assert gate.expected_rows(1) == 1


def test_an_empty_round_is_no_evidence() -> None:
    gate = DraftGate()
    gate.record([], [], [])
    assert gate.expected_rows(1) == 1


def test_a_paying_batch_size_does_not_keep_another_from_being_probed() -> None:
    gate = DraftGate(trial=4, probe=4, probe_every=10)
    crowd = ["a", "b", "c", "d"]
    for _ in range(4):
        gate.record(crowd, [1] * 4, [8] * 4)
        gate.record(["a"], [6], [8])
    probed = False
    for _ in range(60):
        assert gate.drafts(["a"], TIMES)
        probed |= gate.drafts(crowd, TIMES)
    assert probed
