"""Index maths of the expert all-to-all against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.dispatch import (
    DispatchError,
    ExpertBlocks,
    ExpertShards,
    aligned,
    layout,
    low_latency_copies,
    low_latency_slots,
    normal_copies,
    sum_copies,
)

# Examples are few and cheap; the first call of an operator may take seconds on a busy machine.
relaxed = settings(deadline=None, max_examples=50)


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, ExpertShards]:
    """[T, K] ids with -1 anywhere, T may be 0; some ranks may be wanted by nobody."""
    ranks = draw(st.sampled_from([1, 2, 3, 16]))
    per_rank = draw(st.integers(1, 4))
    tokens, choices = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    top = draw(st.integers(0, ranks * per_rank))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    ids = torch.randint(-1, top, (tokens, choices), generator=generator)
    return ids, ExpertShards(ranks * per_rank, ranks)


@relaxed
@given(st.integers(1, 9), st.integers(1, 9))
def test_blocks_hold_every_expert_once(per_rank: int, parts: int) -> None:
    blocks = ExpertBlocks(per_rank, parts)
    held = [list(blocks.experts(part)) for part in range(parts)]
    assert [expert for block in held for expert in block] == list(range(per_rank))
    sizes = [len(block) for block in held]
    assert max(sizes) - min(sizes) <= 1
    last = torch.arange(per_rank)
    # A row goes with its last expert; experts elsewhere are -1.
    for part, expert in zip(
        blocks.part_of(torch.stack((last * 0 - 1, last), 1)), last, strict=True
    ):
        assert int(expert) in held[int(part)]


@relaxed
@given(routings())
def test_layout_counts_ranks_nodes_and_experts(case: tuple[torch.Tensor, ExpertShards]) -> None:
    ids, shards = case
    got = layout(ids, shards)
    rows = [{i // shards.per_rank for i in row if i >= 0} for row in ids.tolist()]
    assert got.in_rank.tolist() == [[r in row for r in range(shards.ranks)] for row in rows]
    assert got.tokens_per_rank.tolist() == [
        sum(r in row for row in rows) for r in range(shards.ranks)
    ]
    flat = ids.flatten().tolist()
    assert got.tokens_per_expert.tolist() == [flat.count(e) for e in range(shards.experts)]
    assert {got.tokens_per_rank.dtype, got.tokens_per_expert.dtype} == {torch.int32}
    if shards.ranks <= 8:
        assert got.tokens_per_node is None
    else:
        nodes = [{r // 8 for r in row} for row in rows]
        expected = [sum(n in row for row in nodes) for n in range(shards.ranks // 8)]
        assert got.tokens_per_node is not None
        assert got.tokens_per_node.tolist() == expected


@relaxed
@given(routings())
def test_normal_sends_one_copy_per_rank(case: tuple[torch.Tensor, ExpertShards]) -> None:
    ids, shards = case
    plan = layout(ids, shards)
    copies = normal_copies(plan.in_rank, plan.tokens_per_expert)
    loop = [
        (rank, token)
        for rank in range(shards.ranks)
        for token, row in enumerate(ids.tolist())
        if any(i // shards.per_rank == rank for i in row if i >= 0)
    ]
    assert copies.rows.tolist() == [token for _, token in loop]
    assert copies.per_rank == [sum(r == rank for r, _ in loop) for rank in range(shards.ranks)]


@relaxed
@given(routings(), st.integers(1, 3))
def test_low_latency_slots_are_filled_from_the_front_by_source(
    case: tuple[torch.Tensor, ExpertShards], spare: int
) -> None:
    ids, shards = case
    sources = [ids, ids.flip(0), ids[:1]][: shards.ranks]
    sources += [ids[:0]] * (shards.ranks - len(sources))
    m = ids.shape[0] * ids.shape[1] + spare
    copies = [low_latency_copies(part, shards, m) for part in sources]
    width = m * shards.ranks
    for rank in range(shards.ranks):
        shape = (shards.ranks, shards.per_rank)
        arrived = torch.stack([c.per_expert.view(shape)[rank] for c in copies])
        slots = low_latency_slots(arrived, width)
        filled: dict[int, tuple[int, int]] = {}
        position = 0
        for source, plan in enumerate(copies):
            for copy in range(sum(plan.per_rank[:rank]), sum(plan.per_rank[: rank + 1])):
                filled[int(slots[position])] = (source, int(plan.rows[copy]))
                position += 1
        assert position == len(slots) == len(filled)
        for expert in range(shards.per_rank):
            wanted = [
                (source, token)
                for source, part in enumerate(sources)
                for token, row in enumerate(part.tolist())
                for i in row
                if i == rank * shards.per_rank + expert
            ]
            got = [filled.get(expert * width + s) for s in range(width)]
            assert got == [*wanted, *[None] * (width - len(wanted))]


@relaxed
@given(routings())
def test_copies_come_back_as_plain_and_as_weighted_sums(
    case: tuple[torch.Tensor, ExpertShards],
) -> None:
    ids, shards = case
    tokens = ids.shape[0]
    x = torch.randn(tokens, 3, dtype=torch.float64)
    plan = layout(ids, shards)
    normal = normal_copies(plan.in_rank, plan.tokens_per_expert)
    plain = sum_copies(x[normal.rows], normal, tokens, None)
    torch.testing.assert_close(plain, x * plan.in_rank.sum(dim=1, keepdim=True))
    weights = torch.rand(ids.shape, dtype=torch.float64)
    low = low_latency_copies(ids, shards, ids.numel())
    weighted = sum_copies(x[low.rows], low, tokens, weights)
    torch.testing.assert_close(weighted, x * (weights * (ids >= 0)).sum(dim=1, keepdim=True))


def test_local_numbers_and_owners() -> None:
    shards = ExpertShards(experts=6, ranks=3)
    ids = torch.tensor([[0, 3, -1], [5, 2, 1]], dtype=torch.int32)
    assert shards.owners(ids).tolist() == [[0, 1, -1], [2, 1, 0]]
    assert shards.local(ids, 1).tolist() == [[-1, 1, -1], [-1, 0, -1]]
    assert shards.local(ids, 0).tolist() == [[0, -1, -1], [-1, -1, 1]]
    assert shards.local(ids, 1).dtype == torch.int32


def test_half_precision_copies_are_summed_in_float32() -> None:
    ids = torch.zeros(1, 300, dtype=torch.int64)
    copies = low_latency_copies(ids, ExpertShards(1, 1), 300)
    back = torch.ones(300, 1, dtype=torch.bfloat16)
    total = sum_copies(back, copies, 1, torch.ones(1, 300))
    assert total.item() == 300.0  # bfloat16 would stop at 256


@pytest.mark.parametrize("ids", [[[4]], [[-2]]])
def test_ids_outside_are_refused(ids: list[list[int]]) -> None:
    with pytest.raises(DispatchError, match=r"-1 or 0\.\.3"):
        layout(torch.tensor(ids), ExpertShards(4, 2))


@pytest.mark.parametrize("ids", [torch.zeros(2), torch.zeros(2, 2)])
def test_ids_of_another_shape_or_type_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(DispatchError, match="topk_idx"):
        low_latency_copies(ids, ExpertShards(4, 2), 9)


def test_more_choices_of_an_expert_than_slots_are_refused() -> None:
    """Their slots would be those of the next expert."""
    twice = torch.tensor([[0, 0]])
    with pytest.raises(DispatchError, match="expert 0 chosen 2 times"):
        low_latency_copies(twice, ExpertShards(2, 1), 1)
    assert low_latency_copies(twice, ExpertShards(2, 1), 2).per_rank == [2]


@pytest.mark.parametrize(("experts", "ranks"), [(5, 2), (0, 1), (4, 0)])
def test_uneven_shards_are_refused(experts: int, ranks: int) -> None:
    with pytest.raises(DispatchError, match="redundant"):
        ExpertShards(experts, ranks)


def test_alignment() -> None:
    assert [aligned(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
