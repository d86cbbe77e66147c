"""Single-batch overlap: the bits of the plain order, whenever transfers happen, and its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_ext.core.overlap import Timed, trace_faults
from sglang_ext.core.overlap_run import Recorder
from sglang_ext.kernels.moe import Activation, ExpertWeights, Routing, routed_experts
from sglang_ext.srt.parallel import row_exchange
from sglang_ext.srt.parallel.expert_exchange import ExpertExchange
from sglang_ext.srt.parallel.single_batch import OverlappedLayer, run_layer
from tests.dist.forked import run_ranks
from tests.dist.routings import HIDDEN, routing

SEEDS = range(8)
WIDTH = 24


class _Late:
    """A transfer that happens when it is waited for; until then its rows are not numbers."""

    def __init__(self, move: Callable[[], None]) -> None:
        self.move = move

    def wait(self) -> None:
        self.move()

    def get_future(self) -> Any:
        return torch.futures.Future()


def _late(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all(out: Any, rows: Any, *sizes: Any, group: Any, async_op: bool = False) -> Any:
        if not async_op:
            return original(out, rows, *sizes, group=group)
        out.fill_(255)
        return _Late(lambda: original(out, rows, *sizes, group=group))

    return all_to_all


def _layer(group: dist.ProcessGroup, low_latency: bool, shared: bool, late: bool) -> list[Timed]:
    """A layer both ways, over all seeds; the trace."""
    if late:
        row_exchange.dist = _Patched(_late(dist.all_to_all_single))  # type: ignore[assignment]
    rank, recorder = group.rank(), Recorder()
    for seed in SEEDS:
        case = routing(seed, group.size())
        generator = torch.Generator().manual_seed(seed)
        w13 = torch.randn(case.experts, 2 * WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        w2 = torch.randn(case.experts, HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        mine = slice(rank * case.per_rank, (rank + 1) * case.per_rank)
        experts = ExpertWeights(w13[mine], w2[mine])
        exchange = ExpertExchange(group, case.per_rank, max_rows=8, hidden=HIDDEN)
        begin = exchange.begin_low_latency if low_latency else exchange.begin
        # The last row is padding: SGLang chooses no experts for it.
        x = torch.cat((case.x[rank], torch.zeros(1, HIDDEN)))
        choice = (case.ids[rank], case.weights[rank])

        arrived = begin(x, *choice)()
        local = Routing(arrived.weights, arrived.ids)
        outputs = routed_experts(arrived.hidden, experts, local, Activation())
        expected = exchange.begin_collect(outputs, arrived.journey)()
        expected = expected + 3 * x if shared else expected

        exchange.buffer.watch(recorder.sent)
        layer = OverlappedLayer(
            exchange, experts, Activation(), (lambda r: 3 * r) if shared else None
        )
        got = run_layer(layer, lambda r, c: begin(r, *c), x, choice, recorder)
        exchange.buffer.watch(None)
        assert torch.equal(got, expected), seed
    return recorder.trace


class _Patched:
    def __init__(self, all_to_all_single: Callable[..., Any]) -> None:
        self.all_to_all_single = all_to_all_single

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@pytest.mark.parametrize(
    ("ranks", "low_latency", "late"),
    [(1, False, False), (2, False, False), (2, True, True), (3, False, True), (3, True, False)],
)
def test_the_same_bits_in_another_order(ranks: int, low_latency: bool, late: bool) -> None:
    for shared in (False, True):
        for trace in run_ranks(ranks, _layer, low_latency, shared, late):
            layers = [[t for t in trace if t.issued.layer == n] for n in range(len(SEEDS))]
            for layer in layers:
                # Nothing is read before its wait, and no wait ends before its transfer.
                assert trace_faults(layer, inputs=("attended", "choices")) == []
                _assert_order(layer, shared)
            parts = [sum(t.issued.op.name == "down" for t in layer) for layer in layers]
            assert set(parts) == {1, 2}


def _never_waiting(group: dist.ProcessGroup) -> None:
    _Late.wait = lambda _: None
    _layer(group, False, True, True)


def test_rows_that_are_not_waited_for_are_seen() -> None:
    """The comparison above can fail: what has not arrived is not numbers."""
    with pytest.raises(AssertionError, match="torch.equal"):
        run_ranks(2, _never_waiting)


def _assert_order(layer: list[Timed], shared: bool) -> None:
    """Rows are under way before the shared experts begin, and before the next block does."""
    names = [t.issued.op.name for t in layer]
    start = {(t.issued.op.name, t.issued.op.part): t.start for t in layer}
    order: list[tuple[str, int | None]] = [("dispatch_a", None)]
    order += [("shared_experts", None)] if shared else []
    order += [("dispatch_b", None), ("gate_up", None)]
    parts = names.count("down")
    for part in range(parts):
        order += [("down", part), ("combine_a", part)]
    order += [("combine_b", part) for part in range(parts)]
    times = [start[one] for one in order]
    assert times == sorted(times)
