"""Thread sets and memory shares of CPU ranks."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.srt.cpu_args import (
    COMPUTED_BINDING,
    THREAD_BINDING,
    bind_threads,
    memory_fraction,
    thread_sets,
    token_capacity,
)

GIB = 1 << 30


@given(st.integers(1, 16), st.integers(1, 64))
def test_every_rank_has_cores_and_none_is_shared_unless_it_must(ranks: int, cores: int) -> None:
    sets = [s.split(",") for s in thread_sets(ranks, list(range(cores))).split("|")]
    assert len(sets) == ranks
    assert all(sets)
    used = [core for cores_of_rank in sets for core in cores_of_rank]
    assert set(used) <= {str(c) for c in range(cores)}
    if cores >= ranks:
        assert len(used) == len(set(used))


@given(st.integers(1, 8), st.integers(0, 40 * GIB), st.integers(2 * GIB, 64 * GIB))
def test_kv_of_all_ranks_fits_in_what_weights_leave(ranks: int, weights: int, free: int) -> None:
    weights = min(weights, int(0.9 * free))
    kv_per_rank = memory_fraction(ranks, weights, free) * free - weights
    assert kv_per_rank > 0
    assert weights + ranks * kv_per_rank <= 0.95 * free + weights * 0.01 + ranks * free * 1e-3


def test_a_small_context_keeps_room_for_many_requests() -> None:
    assert token_capacity(2048) == 65_536
    assert token_capacity(8192) == 131_072


def test_each_server_of_a_process_computes_its_own_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (THREAD_BINDING, COMPUTED_BINDING):
        monkeypatch.setenv(name, "")
    for ranks in (2, 4, 3):
        bind_threads(ranks, ranks)
        assert len(os.environ[THREAD_BINDING].split("|")) == ranks
    bind_threads(1, 1)
    assert THREAD_BINDING not in os.environ
    os.environ[THREAD_BINDING] = "0|1"
    bind_threads(4, 4)
    assert os.environ[THREAD_BINDING] == "0|1", "the user's own binding stays"
