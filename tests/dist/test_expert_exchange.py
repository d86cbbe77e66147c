"""A layer of experts spread over ranks equals the same layer on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_ext.core.dispatch import DispatchError
from sglang_ext.kernels.moe import Activation, ExpertWeights, Routing, routed_experts
from sglang_ext.srt.parallel.collectives import all_gather_parts, reduce_scatter_parts
from sglang_ext.srt.parallel.expert_exchange import ExpertExchange
from tests.dist.forked import run_ranks
from tests.dist.routings import HIDDEN, routing

SEEDS = range(8)
WIDTH = 24


def _experts(count: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(count)
    w13 = torch.randn(count, 2 * WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
    return ExpertWeights(w13, torch.randn(count, HIDDEN, WIDTH, generator=generator) / WIDTH**0.5)


def _spread(group: dist.ProcessGroup, low_latency: bool) -> float:
    """Largest difference between the spread layer and the whole one, over all seeds."""
    rank, worst = group.rank(), 0.0
    for seed in SEEDS:
        case = routing(seed, group.size())
        whole = _experts(case.experts)
        mine = slice(rank * case.per_rank, (rank + 1) * case.per_rank)
        shard = ExpertWeights(whole.w13[mine], whole.w2[mine])
        exchange = ExpertExchange(group, case.per_rank, max_rows=8, hidden=HIDDEN)
        begin = exchange.begin_low_latency if low_latency else exchange.begin
        # The last row is padding: SGLang chooses no experts for it.
        padded = torch.cat((case.x[rank], torch.full((1, HIDDEN), float("nan"))))
        arrived = begin(padded, case.ids[rank], case.weights[rank])()
        local = Routing(arrived.weights, arrived.ids)
        outputs = routed_experts(arrived.hidden, shard, local, Activation())
        total = exchange.begin_collect(outputs, arrived.journey)()
        got, padding = total.tensor_split([len(case.x[rank])])
        assert padding.tolist() == [[0.0] * HIDDEN]
        routed = Routing(case.weights[rank], case.ids[rank])
        expected = routed_experts(case.x[rank], whole, routed, Activation())
        assert got.shape == expected.shape
        if len(got):
            worst = max(worst, float((got - expected).abs().max()))
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("low_latency", [False, True])
def test_spread_experts_equal_whole_ones(ranks: int, low_latency: bool) -> None:
    assert max(run_ranks(ranks, _spread, low_latency)) < 1e-5


def _beyond(group: dist.ProcessGroup) -> str:
    exchange = ExpertExchange(group, 1, max_rows=3, hidden=HIDDEN)
    with pytest.raises(DispatchError) as error:
        exchange.begin_low_latency(
            torch.zeros(4, HIDDEN), torch.zeros(4, 1).int(), torch.ones(4, 1)
        )
    return str(error.value)


def test_more_rows_than_fit_are_refused() -> None:
    (message,) = run_ranks(1, _beyond)
    limit = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    for word in ("expected at least the 4", "found 3", limit):
        assert word in message


def _padded(group: dist.ProcessGroup) -> str:
    """Layers share two receive buffers of padded slots; a third dispatch ends the first journey."""
    case = routing(1, group.size())
    mine = (case.x[group.rank()], case.ids[group.rank()], case.weights[group.rank()])
    layers = [ExpertExchange(group, case.per_rank, 8, HIDDEN) for _ in range(3)]
    both = [layer.begin_low_latency(*mine)() for layer in layers[:2]]
    for layer, arrived in zip(layers, both, strict=False):
        assert arrived.journey.slots.shape == (case.per_rank, 8 * group.size(), HIDDEN)
        back = layer.begin_collect(arrived.hidden, arrived.journey)()
        shares = (mine[2] * (mine[1] >= 0)).sum(dim=1, keepdim=True)
        assert torch.allclose(back, mine[0] * shares, atol=1e-5)
    stale, *_ = [layer.begin_low_latency(*mine)() for layer in layers]
    with pytest.raises(DispatchError) as error:
        layers[0].begin_collect(stale.hidden, stale.journey)
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 3])
def test_low_latency_slots_are_padded_and_two_buffers_live(ranks: int) -> None:
    for message in run_ranks(ranks, _padded):
        assert "one of the last 2 low-latency dispatches" in message


class _Group:
    """The part of SGLang's group coordinator that the collectives read."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.device_group = group
        self.world_size, self.rank_in_group = group.size(), group.rank()


def _uneven(group: dist.ProcessGroup) -> tuple[Any, Any]:
    sizes = [3, 0, 5][: group.size()]
    coordinator = _Group(group)
    rank = group.rank()
    rows = torch.arange(sum(sizes) * 2.0).view(-1, 2) * (rank + 1)
    part = reduce_scatter_parts(coordinator, rows, None, sizes)
    own = torch.full((sizes[rank], 2), float(rank))
    whole = all_gather_parts(coordinator, [own, own + 10], sizes, None)
    return part, whole


def test_uneven_collectives() -> None:
    sizes = [3, 0, 5]
    total = torch.arange(16.0).view(-1, 2) * 6
    answers = run_ranks(3, _uneven)
    assert torch.equal(torch.cat([part for part, _ in answers]), total)
    each = torch.cat([torch.full((n, 2), float(r)) for r, n in enumerate(sizes)])
    for _, (plain, shifted) in answers:
        assert torch.equal(plain, each)
        assert torch.equal(shifted, each + 10)
