"""Every parallel layout answers as one rank does, in fp32, alone and with DSPARK or DFLASH.

The cells come from `sglang_ext.core.support`. A plain run covers one of each kind of layout;
SGLANG_EXT_TEST_MATRIX=1 (`make test-matrix`) runs every cell that says yes.
"""

from __future__ import annotations

import os

import pytest

from sglang_ext.core.support import (
    ALGORITHMS,
    COVERED_SPECULATION,
    LAYOUTS,
    NONE,
    WORKLOADS,
    Layout,
    layout,
    verdict,
)
from tests.e2e.client import greedy
from tests.e2e.faults import VARIABLE
from tests.e2e.layout_runs import CHUNK, RUNS, Answers
from tests.e2e.servers import Server, Spec
from tests.e2e.stand import Stand
from tests.e2e.workload import ragged

pytestmark = pytest.mark.e2e

ALL = os.environ.get("SGLANG_EXT_TEST_MATRIX") == "1"
KINDS = {"dense": "qwen3", "experts": "qwen3_moe"}
DRAFTS = {"DSPARK": "vanilla", "DFLASH": "zlab"}


def _pairs() -> list[tuple[str, str]]:
    pairs = [(one.name, algorithm) for one in LAYOUTS for algorithm in ALGORITHMS]
    if ALL:
        return pairs
    plain = [(one.name, NONE) for one in LAYOUTS if one.covered]
    return [*plain, *COVERED_SPECULATION]


CELLS = [
    (name, algorithm, workload)
    for name, algorithm in _pairs()
    for workload in WORKLOADS
    if verdict(layout(name), algorithm, workload).yes
]


def _spec(stand: Stand, where: Layout, algorithm: str, fault: str = "") -> Spec:
    kind = KINDS[where.model]
    target = stand.checkpoints.target(kind)
    # SGLang divides the chunk by the DP ranks.
    flags = (*where.flags, "--chunked-prefill-size", CHUNK * where.attention_dp)
    env = {VARIABLE: fault} if fault else {}
    if algorithm == NONE:
        return stand.plain_spec(target, *flags, env=env)
    draft = stand.checkpoints.draft(algorithm, DRAFTS[algorithm], kind)
    return stand.spec(algorithm, draft, target, 4, *flags, env=env)


def _server(stand: Stand, where: Layout, algorithm: str, fault: str = "") -> Server:
    return stand.server(_spec(stand, where, algorithm, fault))


_one_rank: dict[tuple[str, str], Answers] = {}


def _expected(stand: Stand, model: str, workload: str) -> Answers:
    """One rank's answers, asked once for all workloads."""
    if (model, workload) not in _one_rank:
        server = _server(stand, Layout("one rank", (), model=model), NONE)
        for name, run in RUNS.items():
            _one_rank[(model, name)] = run(server.client, 1)
    return _one_rank[(model, workload)]


@pytest.mark.parametrize(("name", "algorithm", "workload"), CELLS)
def test_same_tokens_as_one_rank(stand: Stand, name: str, algorithm: str, workload: str) -> None:
    where = layout(name)
    expected = _expected(stand, where.model, workload)
    server = _server(stand, where, algorithm)
    assert RUNS[workload](server.client, where.attention_dp) == expected
    server.assert_healthy()
    if workload == list(WORKLOADS)[-1]:
        _assert_in_use(server, where, algorithm)


def _assert_in_use(server: Server, where: Layout, algorithm: str) -> None:
    """The layout did what its name says at least once, and nothing is left behind."""
    log = server.log()
    for event in where.shows:
        assert f"layout: first {event}" in log, event
    if "--enable-eplb" in where.flags:
        assert log.count("[EPLBManager] rebalance end") >= where.ranks
    if algorithm != NONE:
        replies = server.client.batch(ragged(4, 300), greedy(16))
        assert max(reply.acceptance_length for reply in replies) > 1, "no draft was accepted"
    assert server.client.settle() == 0


# fault -> the layout that must show it
CONTROLS = {
    "combine without other ranks": "ep2 deepep normal",
    "expert weights stay": "eplb static",
    "CP mask shifted": "cp2 zigzag",
}


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_planted_fault_is_seen(stand: Stand, fault: str) -> None:
    """The comparison above can fail: each of these makes it, in some workload."""
    where = layout(CONTROLS[fault])
    expected = {workload: _expected(stand, where.model, workload) for workload in RUNS}
    server = _server(stand, where, NONE, fault)
    got = {workload: run(server.client, where.attention_dp) for workload, run in RUNS.items()}
    stand.pool.drop(server.spec)
    assert got != expected
