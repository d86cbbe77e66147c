"""Every parallel layout answers as one rank does, in fp32, alone and with DSPARK, DFLASH or NEXTN.

A wrong draft costs no token, so what is accepted of it is held to one rank as well. A fault may be
too small to cost one: without speculation the log-probabilities are compared too.

The cells come from `sglang_ext.core.support`. A plain run covers those in `COVERED`;
SGLANG_EXT_TEST_MATRIX=1 (`make test-matrix`) runs every cell that says yes.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil
import pytest

from sglang_ext.core.support import (
    ALGORITHMS_OF,
    COVERED,
    DENSE,
    DFLASH,
    DSPARK,
    EXPERTS,
    LAYOUTS,
    NEXTN,
    NONE,
    V4,
    V32,
    WORKLOADS,
    Layout,
    layout,
    verdict,
)
from tests.e2e.client import greedy
from tests.e2e.faults import VARIABLE
from tests.e2e.layout_runs import CHUNK, LONG, RUNS, Answers
from tests.e2e.servers import Server, Spec
from tests.e2e.stand import STEADY, Stand
from tests.e2e.workload import lengths, ragged, random_prompt

pytestmark = pytest.mark.e2e

ALL = os.environ.get("SGLANG_EXT_TEST_MATRIX") == "1"
# model -> what `tests.tiny` calls it
KINDS = {DENSE: "qwen3", EXPERTS: "qwen3_moe", V32: "deepseek_v32", V4: "deepseek_v4"}
DRAFTS = {"DSPARK": "vanilla", "DFLASH": "zlab"}
LOAD = re.compile(r'^sglang_ext_expert_load_max_over_mean\{.*when="(\w+)".*\} (\S+)$', re.MULTILINE)
# What a verification in two batches meets. A chain of NEXTN has several rows: no half is empty.
SPLIT = ("two-batch split of a verification", "two-batch split inside a verified request")
RAGGED = (*SPLIT, "two-batch split with an empty half")
ONE_RANK = Layout("one rank", ())
# Layouts in which the rows of all DP ranks meet for every layer.
GATHERED = ("dp2 attention", "ep2 standard")
HALVES = {NONE: (), NEXTN: SPLIT, DSPARK: RAGGED, DFLASH: RAGGED}


def _runs() -> list[tuple[str, str, str]]:
    if not ALL:
        return list(COVERED)
    return [
        (x.name, model, algorithm)
        for x in LAYOUTS
        for model in x.models
        for algorithm in ALGORITHMS_OF[model]
    ]


CELLS = [
    (name, model, algorithm, workload)
    for name, model, algorithm in _runs()
    for workload in WORKLOADS
    if verdict(layout(name), model, algorithm, workload).yes
]


def _target(stand: Stand, model: str, algorithm: str) -> Path:
    # A V4 checkpoint carries a DSPARK draft or an MTP module.
    carried = {"with_dspark": False, "with_mtp": True} if algorithm == NEXTN else {}
    return stand.checkpoints.target(KINDS[model], **carried)


def _spec(stand: Stand, where: Layout, model: str, algorithm: str, fault: str = "") -> Spec:
    kind = KINDS[model]
    target = _target(stand, model, algorithm)
    # SGLang divides the chunk by the DP ranks.
    flags = (*where.flags, "--chunked-prefill-size", CHUNK * where.attention_dp)
    if "--enable-eplb" in flags:
        flags += ("--enable-metrics",)
    env = {VARIABLE: fault} if fault else {}
    if algorithm == NONE:
        return stand.plain_spec(target, *flags, env=env)
    if algorithm == NEXTN:
        return stand.plain_spec(target, "--speculative-algorithm", NEXTN, *flags, env=env)
    if (model, algorithm) == (V4, "DSPARK"):
        bundled = ("--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", 5)
        return stand.plain_spec(target, *bundled, *flags, env=STEADY | env)
    draft = stand.checkpoints.draft(algorithm, DRAFTS[algorithm], kind)
    return stand.spec(algorithm, draft, target, 4, *flags, env=env)


def _server(stand: Stand, where: Layout, model: str, algorithm: str, fault: str = "") -> Server:
    return stand.server(_spec(stand, where, model, algorithm, fault))


_one_rank: dict[tuple[Path, str], Answers] = {}
_one_rank_sure: dict[Path, list[float]] = {}


def _expected(stand: Stand, target: Path, workload: str) -> Answers:
    """One rank's answers without speculation, asked once for all workloads."""
    if (target, workload) not in _one_rank:
        server = stand.server(stand.plain_spec(target, "--chunked-prefill-size", CHUNK))
        for name, run in RUNS.items():
            _one_rank[(target, name)] = run(server.client, 1)
        _one_rank_sure[target] = _sure(server)
    return _one_rank[(target, workload)]


def _sure(server: Server) -> list[float]:
    """Log-probabilities of the tokens that follow prompts not sent before."""
    prompts = [random_prompt(n, 1500 + n) for n in (6, 33, LONG)]
    replies = server.client.batch(prompts, greedy(4), return_logprob=True)
    return [one for reply in replies for one in reply.logprobs]


# Sums over ranks differ by some 1e-5.
AS_SURE = 1e-3


def _less_sure(server: Server, target: Path) -> float:
    """The largest difference of their log-probabilities from those of one rank."""
    pairs = zip(_sure(server), _one_rank_sure[target], strict=True)
    return max(abs(found - expected) for found, expected in pairs)


@pytest.mark.parametrize(("name", "model", "algorithm", "workload"), CELLS)
def test_same_tokens_as_one_rank(
    stand: Stand, name: str, model: str, algorithm: str, workload: str
) -> None:
    where = layout(name)
    expected = _expected(stand, _target(stand, model, algorithm), workload)
    server = _server(stand, where, model, algorithm)
    assert RUNS[workload](server.client, where.dp_ranks) == expected
    server.assert_healthy()
    if workload == list(WORKLOADS)[-1]:
        _assert_in_use(server, where, algorithm)
        if algorithm == NONE:
            assert _less_sure(server, _target(stand, model, algorithm)) < AS_SURE
        counts = None if algorithm == NONE else _accepted(server)
        assert server.client.settle() == 0
        if counts is not None:
            # Its own server may take this one's place.
            assert counts == _accepted_alone(stand, model, algorithm)


def _accepted(server: Server) -> list[list[int]]:
    """Of prompts not sent before: rounds that accepted 0, 1, 2, ... drafts, per request."""
    replies = server.client.batch(ragged(6, 1300), lengths(6, 24))
    return [reply.accepted for reply in replies]


_alone: dict[tuple[str, str], list[list[int]]] = {}


def _accepted_alone(stand: Stand, model: str, algorithm: str) -> list[list[int]]:
    """What `_accepted` counts on one rank, some accepted drafts among it."""
    if (model, algorithm) not in _alone:
        counts = _accepted(_server(stand, ONE_RANK, model, algorithm))
        assert any(n for of_request in counts for n in of_request[1:]), "no draft was accepted"
        _alone[(model, algorithm)] = counts
    return _alone[(model, algorithm)]


def _assert_in_use(server: Server, where: Layout, algorithm: str) -> None:
    """The layout did what its name says at least once, and nothing is left behind."""
    log = server.log()
    halves = HALVES[algorithm] if "--enable-two-batch-overlap" in where.flags else ()
    # Uneven prefills meet one after another; decode steps of like size padded to the longest.
    decodes = where.name in GATHERED and algorithm == NONE
    gathers = ("MAX_LEN gather of a decode",) if decodes else ()
    for event in (*where.shows, *halves, *gathers):
        assert f"layout: first {event}" in log, event
    if "--enable-eplb" in where.flags:
        assert log.count("[EPLBManager] rebalance end") >= where.ranks
        loads = re.findall(r"max / mean over ranks: (\S+) before, (\S+) after", log)
        assert loads, "the balance of a rebalance is not reported"
        # A greedy placement may lose a little where there was little to gain.
        assert all(float(after) <= max(float(before), 1.25) for before, after in loads), loads
        ratios = LOAD.findall(server.client.get("/metrics").text)
        assert {when for when, _ in ratios} == {"before", "after"}
        assert all(0.999 <= float(ratio) <= where.ranks for _, ratio in ratios), ratios


def test_an_idle_controller_rests(stand: Stand) -> None:
    """The process that hands out requests takes no core from the ranks while there is none."""
    workload = next(iter(WORKLOADS))
    expected = _expected(stand, _target(stand, EXPERTS, NONE), workload)
    server = _server(stand, layout("dp2 attention"), EXPERTS, NONE)
    tree = psutil.Process(server.pid).children(recursive=True)
    (controller,) = (p for p in tree if "sglang::data_parallel" in " ".join(p.cmdline()))
    before = controller.cpu_times()
    time.sleep(3)
    after = controller.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5
    assert RUNS[workload](server.client, 2) == expected


# (fault, and the layout, the model and the algorithm that must show it)
CONTROLS = (
    ("combine without other ranks", "ep2 deepep normal", EXPERTS, NONE),
    ("slots go back sorted", "ep2 deepep low_latency", EXPERTS, NONE),
    ("rows leave after the first expert", "single-batch overlap", EXPERTS, NONE),
    ("expert weights stay", "eplb static", EXPERTS, NONE),
    ("expert weights stay", "eplb dynamic", V4, NONE),
    ("CP mask shifted", "cp2 zigzag", DENSE, NONE),
    # It changes no token.
    ("CP mask shifted", "cp2 interleave", DENSE, NONE),
    ("compressor rows lost", "cp2 interleave", V4, NONE),
    ("stage without residual", "pp2", EXPERTS, NONE),
    ("second half without the first", "two-batch overlap", EXPERTS, DSPARK),
)


@pytest.mark.parametrize(("fault", "name", "model", "algorithm"), CONTROLS)
def test_a_planted_fault_is_seen(
    stand: Stand, fault: str, name: str, model: str, algorithm: str
) -> None:
    """The comparison above can fail: each of these makes it, in some workload."""
    where = layout(name)
    target = _target(stand, model, algorithm)
    expected = {workload: _expected(stand, target, workload) for workload in RUNS}
    server = _server(stand, where, model, algorithm, fault)
    seen = (
        any(
            run(server.client, where.dp_ranks) != expected[workload]
            for workload, run in RUNS.items()
        )
        or _less_sure(server, target) > AS_SURE
    )
    stand.pool.drop(server.spec)
    assert seen


# The same, of faults that change no token: only what is accepted shows them.
OF_DRAFTS = {
    "features in the order of ranks": ("cp2 interleave", DENSE, DSPARK),
    "features of the first half alone": ("two-batch overlap", EXPERTS, DFLASH),
}


@pytest.mark.parametrize("fault", OF_DRAFTS)
def test_a_planted_fault_of_a_draft_is_seen(stand: Stand, fault: str) -> None:
    """A wrong draft is seen by what is accepted, and by nothing else."""
    name, model, algorithm = OF_DRAFTS[fault]
    where = layout(name)
    expected = _expected(stand, _target(stand, model, algorithm), "ragged")
    server = _server(stand, where, model, algorithm, fault)
    assert RUNS["ragged"](server.client, where.dp_ranks) == expected
    got = _accepted(server)
    stand.pool.drop(server.spec)
    assert got != _accepted_alone(stand, model, algorithm)
