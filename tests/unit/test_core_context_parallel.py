"""Splits of a prompt over ranks, against attention computed whole in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_ext.core.context_parallel import (
    Split,
    Strategy,
    can_zigzag,
    causal_work,
    merge_partial,
    partial_attention,
    positions_of,
    ring_schedule,
    ring_work,
    split,
    striped_mask,
    zigzag_block_order,
    zigzag_block_sizes,
)

relaxed = settings(deadline=None, max_examples=40)
STRATEGIES = get_args(Strategy)
HEADS, DIM = 2, 4

batches = st.tuples(
    st.sampled_from(STRATEGIES),
    st.lists(st.integers(0, 23), min_size=1, max_size=3),
    st.integers(1, 5),
)


def _visible(lengths: list[int], queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    requests, positions = positions_of(lengths)
    rows = [
        [bool(requests[q] == requests[k] and positions[k] <= positions[q]) for k in keys]
        for q in queries
    ]
    return torch.tensor(rows, dtype=torch.bool).view(len(queries), len(keys))


def _full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out, first = [], 0
    for n in lengths:
        part = slice(first, first + n)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part])
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), v[part]))
        first += n
    return torch.cat(out)


def _qkv(total: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(total)
    return torch.randn(3, total, HEADS, DIM, dtype=torch.float64, generator=generator)


@relaxed
@given(batches)
def test_every_token_is_held_once_and_returns_to_its_place(
    batch: tuple[Strategy, list[int], int],
) -> None:
    strategy, lengths, ranks = batch
    plan = split(strategy, lengths, ranks)
    assert sorted(torch.cat(plan.ranks).tolist()) == list(range(sum(lengths)))
    tokens = torch.arange(sum(lengths))
    gathered = torch.cat([tokens[held] for held in plan.ranks])
    assert torch.equal(gathered[plan.gather_order()], tokens)
    longest = max(plan.lengths)
    padded = torch.full((ranks, longest), -1)
    for rank, held in enumerate(plan.ranks):
        padded[rank, : len(held)] = tokens[held]
    assert torch.equal(padded.flatten()[plan.padded_gather_order()], tokens)


@relaxed
@given(batches)
@example(("interleave", [0], 2))
@example(("interleave", [1], 4))
def test_own_queries_against_gathered_keys_equal_full_attention(
    batch: tuple[Strategy, list[int], int],
) -> None:
    strategy, lengths, ranks = batch
    q, k, v = _qkv(sum(lengths))
    plan, every = split(strategy, lengths, ranks), torch.arange(sum(lengths))
    parts = [
        partial_attention(q[held], k, v, _visible(lengths, held, every))[0] for held in plan.ranks
    ]
    torch.testing.assert_close(torch.cat(parts)[plan.gather_order()], _full(q, k, v, lengths))


@relaxed
@given(batches)
def test_the_ring_merges_to_full_attention(batch: tuple[Strategy, list[int], int]) -> None:
    strategy, lengths, ranks = batch
    q, k, v = _qkv(sum(lengths))
    plan = split(strategy, lengths, ranks)
    # What each rank holds moves by real sends, so a wrong schedule gives wrong keys.
    holding = list(plan.ranks)
    merged: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * ranks
    for step in range(ranks):
        arriving: dict[int, torch.Tensor] = {}
        for rank in range(ranks):
            move = ring_schedule(rank, ranks)[step]
            keys = holding[rank]
            assert torch.equal(keys, plan.ranks[move.keys_of])
            mine = plan.ranks[rank]
            visible = _visible(lengths, mine, keys)
            part = partial_attention(q[mine], k[keys], v[keys], visible)
            before = merged[rank]
            merged[rank] = part if before is None else merge_partial(before, part)
            if move.send_to is not None:
                arriving[move.send_to] = keys
        for rank, keys in arriving.items():
            holding[rank] = keys
        assert bool(arriving) == (step < ranks - 1)
    out = torch.cat([part[0] for part in merged if part is not None])
    torch.testing.assert_close(out[plan.gather_order()], _full(q, k, v, lengths))


def test_zigzag_blocks() -> None:
    assert zigzag_block_order(4) == [0, 7, 1, 6, 2, 5, 3, 4]
    assert zigzag_block_sizes(19, 4) == [3, 3, 3, 2, 2, 2, 2, 2]
    plan = split("zigzag", [19], 4)
    assert plan.ranks[0].tolist() == [0, 1, 2, 17, 18]
    assert plan.ranks[3].tolist() == [9, 10, 11, 12]


def test_a_request_shorter_than_its_blocks() -> None:
    plan = split("zigzag", [3, 8], 4)
    assert plan.lengths == [3, 3, 3, 2]
    assert not can_zigzag([3, 8], 4)
    assert can_zigzag([8, 9], 4)


def test_interleave_runs_over_the_batch_and_striped_over_each_request() -> None:
    assert [t.tolist() for t in split("interleave", [3, 3], 2).ranks] == [[0, 2, 4], [1, 3, 5]]
    assert [t.tolist() for t in split("striped", [3, 3], 2).ranks] == [[0, 2, 3, 5], [1, 4]]


@relaxed
@given(st.integers(0, 12), st.integers(1, 4))
def test_striped_masks_equal_global_causality(n: int, ranks: int) -> None:
    plan = split("striped", [n], ranks)
    for q_rank, queries in enumerate(plan.ranks):
        for k_rank, keys in enumerate(plan.ranks):
            mask = striped_mask(len(queries), len(keys), q_rank, k_rank)
            assert torch.equal(mask, queries[:, None] >= keys[None])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_counts_equal_brute_force(strategy: Strategy, ranks: int) -> None:
    lengths = [40, 7]
    plan = split(strategy, lengths, ranks)
    every = torch.arange(47)
    work = causal_work(plan, lengths)
    assert work == [int(_visible(lengths, held, every).sum()) for held in plan.ranks]
    ring = ring_work(plan, lengths)
    assert ring.sum(dim=0).tolist() == work
    assert sum(work) == 40 * 41 // 2 + 7 * 8 // 2


def _ratio(strategy: Strategy, n: int, ranks: int) -> tuple[float, float]:
    """Longest over mean work: gathered keys, and the ring with a wait in each step."""
    plan = split(strategy, [n], ranks)
    work, ring = causal_work(plan, [n]), ring_work(plan, [n])
    mean = sum(work) / ranks
    return max(work) / mean, int(ring.amax(dim=1).sum()) / mean


# The table of docs/context_parallel.md: n = 1024, 8 ranks.
@pytest.mark.parametrize(
    ("strategy", "gathered", "ring"),
    [("contiguous", 1.874, 1.874), ("zigzag", 1.0, 1.0), ("interleave", 1.007, 1.007),
     ("striped", 1.007, 1.007)],
)  # fmt: skip
def test_balance_of_the_documented_table(strategy: Strategy, gathered: float, ring: float) -> None:
    assert _ratio(strategy, 1024, 8) == pytest.approx((gathered, ring), abs=2e-3)


def test_a_wrong_mask_or_order_is_noticed() -> None:
    lengths, (q, k, v) = [17], _qkv(17)
    plan, every = split("zigzag", lengths, 3), torch.arange(17)
    visible = [_visible(lengths, held, every) for held in plan.ranks]
    parts = [partial_attention(q[h], k, v, m)[0] for h, m in zip(plan.ranks, visible, strict=True)]
    whole = _full(q, k, v, lengths)
    assert not torch.allclose(torch.cat(parts), whole)
    local = Split(tuple(torch.arange(len(h)) for h in plan.ranks))
    wrong = [
        partial_attention(q[h], k, v, _visible(lengths, p, every))[0]
        for h, p in zip(plan.ranks, local.ranks, strict=True)
    ]
    assert not torch.allclose(torch.cat(wrong)[plan.gather_order()], whole)


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks >= 1"):
        split("zigzag", [4], 0)
    with pytest.raises(ValueError, match="strategy"):
        split("spiral", [4], 2)  # type: ignore[arg-type]
