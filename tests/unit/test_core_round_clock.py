"""Drift between measured and actual round times."""

from __future__ import annotations

import pytest

from sglang_ext.core.spec.round_clock import RoundClock


def test_nothing_seen_changes_nothing() -> None:
    assert RoundClock().factors(4) == (1.0, 1.0)


def test_a_slowdown_seen_on_one_side_is_assumed_on_both() -> None:
    clock = RoundClock()
    clock.note(1, drafted=True, seconds=3.0, predicted=1.5)
    assert clock.factors(1) == (2.0, 2.0)


def test_each_side_keeps_its_own_once_seen() -> None:
    clock = RoundClock()
    clock.note(3, drafted=True, seconds=3.0, predicted=1.0)
    clock.note(4, drafted=False, seconds=1.0, predicted=1.0)
    assert clock.factors(3) == (1.0, 3.0)
    assert clock.factors(1) == (1.0, 1.0)


def test_one_stall_is_bounded() -> None:
    clock = RoundClock()
    for _ in range(20):
        clock.note(1, drafted=False, seconds=1.0, predicted=1.0)
    clock.note(1, drafted=False, seconds=100.0, predicted=1.0)
    assert clock.factors(1)[0] == pytest.approx(1.0 + 0.1 * 3.0)


def test_plain_rounds_are_shown_once_and_only_after_drafted_ones() -> None:
    clock = RoundClock(samples=2)
    assert not clock.wants_plain(1)
    for _ in range(2):
        clock.note(1, drafted=True, seconds=1.0, predicted=1.0)
    assert clock.wants_plain(1)
    for _ in range(2):
        clock.note(1, drafted=False, seconds=1.0, predicted=1.0)
    assert not clock.wants_plain(1)
