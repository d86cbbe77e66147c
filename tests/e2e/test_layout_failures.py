"""A rank that dies ends its server, with a message and without leaving a process behind; two nodes.

Nodes are two launchers on one machine that meet on loopback.
"""

from __future__ import annotations

import contextlib
import signal
import time

import psutil
import pytest

from sglang_ext.core.support import layout
from tests.e2e.client import greedy
from tests.e2e.servers import Server, Spec, group_is_gone
from tests.e2e.stand import Stand
from tests.e2e.workload import lengths, ragged, random_prompt

pytestmark = pytest.mark.e2e

SECONDS = 30


def _ranks(server: Server) -> dict[str, psutil.Process]:
    """Model ranks of a server by their titles, such as `sglang::scheduler_DP1_TP1_EP1`."""
    found = {}
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = process.name()
            if title.startswith("sglang::scheduler"):
                found[title] = process
    return found


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_dead_rank_ends_the_server(stand: Stand, busy: bool) -> None:
    target = stand.checkpoints.target("qwen3_moe")
    # A spec of its own: nobody else wants a server that is about to die.
    seed = ("--random-seed", 100 + busy)
    spec = stand.plain_spec(target, *layout("ep2 deepep normal").flags, *seed)
    server = stand.server(spec)
    ranks = _ranks(server)
    assert len(ranks) == 2, sorted(ranks)
    victim = ranks[max(ranks)]
    if busy:
        stream = server.client.stream(random_prompt(9, 1), greedy(1500, ignore_eos=True))
        next(stream)
    died = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    code = server.parent.wait(server.pid, SECONDS)
    seconds = time.monotonic() - died
    log, named = server.log(), str(victim.pid)
    assert code not in (0, None), f"after {seconds:.0f} s:\n{log[-3000:]}"
    if busy:
        # Its peer notices first, in the middle of an exchange: gloo names an address, not a rank.
        assert "closed by peer" in log or "reset by peer" in log or named in log, log[-3000:]
    else:
        assert named in log, log[-3000:]
    assert group_is_gone(server.pid)
    stand.pool.drop(spec)


TWO_NODES = ("tp2", "ep2 deepep normal", "pp2")


@pytest.mark.parametrize("name", TWO_NODES)
def test_two_nodes(stand: Stand, name: str) -> None:
    """One rank per node; the answers are those of a single node's single rank."""
    target = stand.checkpoints.target("qwen3_moe")
    expected = stand.server(stand.plain_spec(target)).client.batch(ragged(5, 60), lengths(5, 14))
    port = stand.pool.next_port()
    meet = ("--nnodes", 2, "--dist-init-addr", f"127.0.0.1:{port}")
    common = stand.plain_spec(target, *layout(name).flags, *meet)
    second = _second_node(stand, common)
    try:
        first = stand.server(Spec((*common.argv, "--node-rank", "0"), common.env))
        got = first.client.batch(ragged(5, 60), lengths(5, 14))
        assert [r.ids for r in got] == [r.ids for r in expected]
        first.assert_healthy()
        stand.pool.drop(first.spec)
    finally:
        second.stop()
    assert group_is_gone(second.pid)


def _second_node(stand: Stand, common: Spec) -> Server:
    """The launcher of node 1: it has ranks and no port of its own to answer on."""
    spec = Spec((*common.argv, "--node-rank", "1"), common.env)
    order, port, log = stand.pool._order(spec)
    return Server(spec, stand.pool.parent.start(order, log), port, log, stand.pool.parent)
