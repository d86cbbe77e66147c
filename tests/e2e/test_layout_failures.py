"""A rank that dies ends its server, with a message and without leaving a process behind; two nodes.

Nodes are two launchers on one machine, each in a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from sglang_ext.core.support import NONE, layout
from tests.e2e.client import greedy
from tests.e2e.nodes import Node, inside, two_nodes
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


def _name(title: str) -> str:
    return title.removeprefix("sglang::scheduler_").replace("_", " ")


# (layout, whether it is at work, which rank is killed)
DEATHS = (
    ("ep2 deepep normal", False, -1),
    ("ep2 deepep normal", True, 0),
    ("tp2", True, -1),
    # A replica is a child of the process that hands out requests, and has no peer.
    ("dp2 replicas", True, 0),
)


@pytest.mark.parametrize(("name", "busy", "which"), DEATHS)
def test_a_dead_rank_ends_the_server(stand: Stand, name: str, busy: bool, which: int) -> None:
    target = stand.checkpoints.target("qwen3_moe")
    # A spec of its own: nobody else wants a server that is about to die.
    seed = ("--random-seed", 100 + busy)
    spec = stand.plain_spec(target, *layout(name).flags, *seed)
    server = stand.server(spec)
    ranks = _ranks(server)
    assert len(ranks) == 2, sorted(ranks)
    victim_title = sorted(ranks)[which]
    victim = ranks[victim_title]
    if busy:
        # The first request goes to the first rank.
        stream = server.client.stream(random_prompt(9, 1), greedy(1500, ignore_eos=True))
        next(stream)
    died = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    code = server.parent.wait(server.pid, SECONDS)
    seconds = time.monotonic() - died
    log = server.log()
    assert code not in (0, None), f"after {seconds:.0f} s:\n{log[-3000:]}"
    # Busy, a peer is the first to notice, in the middle of an exchange; idle, its parent is.
    assert f"rank {_name(victim_title)} (pid {victim.pid}) has died" in log, log[-3000:]
    assert group_is_gone(server.pid)
    stand.pool.drop(spec)


def test_replicas_end_without_a_word(stand: Stand) -> None:
    """Asked to end, a server whose ranks are watched by their parent reports no death."""
    target = stand.checkpoints.target("qwen3_moe")
    spec = stand.plain_spec(target, *layout("dp2 replicas").flags)
    server = stand.server(spec)
    stand.pool.drop(spec)
    assert "has died" not in server.log()
    assert "SIGQUIT" not in server.log()
    assert group_is_gone(server.pid)


# (layout, algorithm)
TWO_NODES = (
    ("tp2", NONE),
    ("ep2 deepep normal", NONE),
    ("ep2 deepep normal", "DSPARK"),
    ("pp2", NONE),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(two_nodes())
        except PermissionError as reason:
            pytest.skip(f"two nodes on one machine: {reason}")
        yield pair


@contextlib.contextmanager
def _served(
    stand: Stand, nodes: tuple[Node, Node], name: str, algorithm: str
) -> Iterator[tuple[Server, Server]]:
    """The launchers of both nodes; the first answers, to a thread that is inside its node."""
    target = stand.checkpoints.target("qwen3_moe")
    meet = ("--nnodes", 2, "--dist-init-addr", f"{nodes[0].address}:{stand.pool.next_port()}")
    flags = (*layout(name).flags, *meet)
    common = stand.plain_spec(target, *flags)
    if algorithm != NONE:
        draft = stand.checkpoints.draft(algorithm, "vanilla", "qwen3_moe")
        common = stand.spec(algorithm, draft, target, 4, *flags)
    specs = [_on_node(common, rank, node) for rank, node in enumerate(nodes)]
    second = _second_node(stand, specs[1])
    try:
        with inside(nodes[0]):
            yield stand.server(specs[0]), second
        stand.pool.drop(specs[0])
    finally:
        second.stop()
    assert group_is_gone(second.pid)


@pytest.mark.parametrize(("name", "algorithm"), TWO_NODES)
def test_two_nodes(stand: Stand, nodes: tuple[Node, Node], name: str, algorithm: str) -> None:
    """One rank per node, each in a network of its own; the answers are those of one rank."""
    target = stand.checkpoints.target("qwen3_moe")
    expected = stand.server(stand.plain_spec(target)).client.batch(ragged(5, 60), lengths(5, 14))
    with _served(stand, nodes, name, algorithm) as (first, _):
        got = first.client.batch(ragged(5, 60), lengths(5, 14))
        first.assert_healthy()
    assert [r.ids for r in got] == [r.ids for r in expected]
    if algorithm != NONE:
        assert max(r.acceptance_length for r in got) > 1, "no draft was accepted"


@pytest.mark.parametrize("busy", [True, False], ids=["serving", "idle"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_dead_rank_of_a_node_is_named(
    stand: Stand, nodes: tuple[Node, Node], node: int, busy: bool
) -> None:
    """The node that answers says who is gone, and both nodes end."""
    with _served(stand, nodes, "ep2 deepep normal", NONE) as servers:
        first = servers[0]
        ((title, victim),) = _ranks(servers[node]).items()
        if busy:
            stream = first.client.stream(random_prompt(9, 1), greedy(1500, ignore_eos=True))
            next(stream)
        victim.send_signal(signal.SIGKILL)
        for server in servers:
            code = server.parent.wait(server.pid, SECONDS)
            assert code is not None, server.log()[-3000:]
            # SGLang's launcher of a later node ends with 0 whatever became of its ranks.
            assert code or server is not first
            assert group_is_gone(server.pid)
    name = _name(title)
    here = f"rank {name} (pid {victim.pid}) has died"
    there = f"lost was one of {name} (node {node}, {nodes[node].address})"
    assert (there if node else here) in first.log(), first.log()[-3000:]


def _on_node(common: Spec, rank: int, node: Node) -> Spec:
    return Spec.of(*common.argv, "--node-rank", rank, env=dict(common.env) | node.env)


def _second_node(stand: Stand, spec: Spec) -> Server:
    """The launcher of node 1: it has ranks and no port of its own to answer on."""
    order, port, log = stand.pool._order(spec)
    return Server(spec, stand.pool.parent.start(order, log), port, log, stand.pool.parent)
