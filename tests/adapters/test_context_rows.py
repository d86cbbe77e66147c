"""Which rows of a split prefill a rank holds, and what each of them may see."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels.attention import AttentionPlan, AttentionSpec, BandMasks, paged_attention
from sglang_ext.kernels.attention.reference import reference_attention
from sglang_ext.srt.attention.dsa_plan import Span, split_spans
from sglang_ext.srt.attention.row_map import Piece, row_map
from sglang_ext.srt.parallel.context import dealt_rows

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=5)


@given(REQUESTS, st.integers(1, 5))
def test_dealt_rows_are_every_row_once(requests: list[tuple[int, int]], size: int) -> None:
    prefix, lengths = [p for p, _ in requests], [n for _, n in requests]
    owner = [(r, p + i) for r, (p, n) in enumerate(requests) for i in range(n)]
    for rank in range(size):
        runs = dealt_rows(prefix, lengths, rank, size)
        rows = [
            (request, keys - 1 - (count - 1 - i) * size)
            for request, keys, count in zip(runs.requests, runs.keys, runs.rows, strict=True)
            for i in range(count)
        ]
        assert rows == owner[rank::size]


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(2, 4), st.sampled_from([-1, 0, 7]), st.sampled_from([0.0, 5.0]))
def test_rows_at_a_stride_attend_to_their_own_past(
    requests: list[tuple[int, int]], size: int, window: int, cap: float
) -> None:
    """Poisoned slots, groups of unequal requests, windows and soft caps."""
    prefix, lengths = [p for p, _ in requests], [n for _, n in requests]
    for rank in range(size):
        runs = dealt_rows(prefix, lengths, rank, size)
        if not runs.rows:
            continue
        width = max(p + n for p, n in requests)
        slots = 1 + torch.randperm(len(requests) * width).view(len(requests), width)
        pool = torch.full((len(requests) * width + 1, 2, 8), float("nan"))
        for r, (p, n) in enumerate(requests):
            pool[slots[r, : p + n]] = torch.randn(p + n, 2, 8)
        q = torch.randn(sum(runs.rows), 4, 8)
        spec = AttentionSpec(scale=0.3, window=window, logit_cap=cap)
        mine = slots[runs.requests]
        plan = AttentionPlan.build(
            mine, runs.keys, runs.rows, masks=BandMasks(), stride=runs.stride
        )
        got = paged_attention(q, pool, pool, plan, spec)
        expected = reference_attention(
            q, pool, pool, mine, runs.keys, runs.rows, spec, stride=runs.stride
        )
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(REQUESTS, st.integers(1, 4))
def test_a_rank_attends_for_its_rows_and_pools_the_blocks_of_all(
    requests: list[tuple[int, int]], size: int
) -> None:
    prefix, lengths = [p for p, _ in requests], [n for _, n in requests]
    batch = SimpleNamespace(req_pool_indices=torch.arange(1, len(requests) + 1))
    table = torch.randperm((len(requests) + 1) * 100).view(-1, 100).int()
    starts = [sum(lengths[:r]) for r in range(len(requests))]
    spans = [Span(r + 1, starts[r], n, p) for r, (p, n) in enumerate(requests)]
    whole = row_map(spans, table, window=4, ratios=(0, 4))
    owner = [(r, p + i) for r, (p, n) in enumerate(requests) for i in range(n)]
    for rank in range(size):
        own = split_spans(batch, dealt_rows(prefix, lengths, rank, size))
        split = row_map(spans, table, window=4, ratios=(0, 4), own=own)
        found = {}
        for piece in split.pieces:
            found |= _newest(piece)
        assert found == {
            row: (position, int(table[request + 1, position]))
            for row, (request, position) in enumerate(owner[rank::size])
        }
        assert split.blocks[4].last.equal(whole.blocks[4].last)
        assert split.blocks[4].members.equal(whole.blocks[4].members)


def _newest(piece: Piece) -> dict[int, tuple[int, int]]:
    """Query row -> its position, and the last slot of its window, which is its own."""
    rows = piece.group.rows[piece.real].tolist()
    own = piece.real_window_slots[:, -1].tolist()
    return dict(zip(rows, zip(piece.positions[piece.real].tolist(), own, strict=True), strict=True))
