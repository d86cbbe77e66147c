"""Rows reach their experts and come back complete, whatever each attention-DP rank brings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sglang_ext.srt.parallel import collectives, expert_rows
from tests.dist.forked import run_ranks

HIDDEN, EXPERTS, CHOICES = 5, 8, 2


class Group:
    """What is used of SGLang's GroupCoordinator."""

    def __init__(self, ranks: list[int]) -> None:
        self.world_size, self.rank_in_group = len(ranks), ranks.index(dist.get_rank())
        self.device_group = dist.new_group(ranks, use_local_synchronization=True)

    def all_gatherv(self, rows: Any, sizes: list[int]) -> Any:
        return collectives.all_gather_parts(self, rows, sizes, None)

    def reduce_scatterv(self, rows: Tensor, sizes: list[int]) -> Tensor:
        return collectives.reduce_scatter_parts(self, rows, None, sizes)


def _data(rows: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    x = torch.randn(rows, HIDDEN, generator=generator)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(rows)]
        or [torch.empty(CHOICES, dtype=torch.int64)]
    )[:rows]
    return x, ids.int(), torch.rand(rows, CHOICES, generator=generator)


def _experts(x: Tensor, ids: Tensor, weights: Tensor, own: range) -> Tensor:
    """The part of `own` experts; expert e multiplies by e + 1, -1 is none."""
    mine = (ids >= own.start) & (ids < own.stop)
    return x * (weights * (ids + 1) * mine).sum(1, keepdim=True)


def _work(world: Any, rows: list[int], attn_tp: int, exchanged: bool) -> None:
    rank, ranks = dist.get_rank(), world.size()
    dp, tp = divmod(rank, attn_tp)
    parallel = SimpleNamespace(
        attn_tp_size=attn_tp,
        attn_tp_rank=tp,
        attn_dp_size=len(rows),
        tp_group=Group(list(range(ranks))),
        attn_tp_group=Group(list(range(dp * attn_tp, (dp + 1) * attn_tp))),
    )
    expert_rows.get_parallel = lambda: parallel  # type: ignore[assignment]
    backend = SimpleNamespace(is_none=lambda: not exchanged)
    expert_rows.get_moe_a2a_backend = lambda: backend  # type: ignore[assignment]
    x, ids, weights = _data(rows[dp], dp)
    choice = expert_rows.StandardTopKOutput(weights, ids, None)
    way = expert_rows.ExpertRows()
    batch = SimpleNamespace(global_num_tokens_cpu=rows)
    there, chosen = way.there(x, choice, batch)
    per = EXPERTS // ranks
    own = range(EXPERTS) if exchanged else range(rank * per, (rank + 1) * per)
    y = _experts(there, chosen.topk_ids, chosen.topk_weights, own)
    expected = _experts(x, ids, weights, range(EXPERTS))
    torch.testing.assert_close(way.back(y, rows[dp], batch), expected)
    if not exchanged:
        assert there.shape[0] == sum(rows)


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(
    ("rows", "attn_tp"),
    [([3, 5], 1), ([0, 4], 1), ([5, 3], 2), ([1, 0], 2), ([0, 0], 2), ([2, 2], 2)],
    ids=str,
)
def test_every_row_gets_its_whole_sum(rows: list[int], attn_tp: int, exchanged: bool) -> None:
    run_ranks(len(rows) * attn_tp, _work, rows, attn_tp, exchanged)


def test_shares_are_even_and_complete() -> None:
    assert expert_rows.shares(7, 3) == [3, 2, 2]
    assert expert_rows.shares(1, 2) == [1, 0]
    assert expert_rows.shares(0, 2) == [0, 0]
