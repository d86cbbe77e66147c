"""Slot bookkeeping of the `sgl_kernel` stand-in against loops over single cells."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.srt.sgl_kernel_torch import cache_locs, draft_inputs, kv_copy

POOL_LEN = 23
REQUESTS = 7

# Segments per request as (start, length): empty batch, empty segments, a full row, ragged.
segment_lists = st.lists(
    st.integers(0, POOL_LEN).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(0, POOL_LEN - start))
    ),
    max_size=REQUESTS,
)
index_dtypes = st.sampled_from([torch.int32, torch.int64])


def table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 10_000, (REQUESTS, POOL_LEN), generator=generator).int()


def rows_for(batch: int) -> torch.Tensor:
    return torch.randperm(REQUESTS, generator=torch.Generator().manual_seed(batch))[:batch]


@given(segments=segment_lists, dtype=index_dtypes)
@settings(deadline=None)
def test_assign_req_to_token_pool_writes_exactly_its_cells(
    segments: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    rows = rows_for(len(segments))
    starts = torch.tensor([s for s, _ in segments], dtype=dtype)
    ends = torch.tensor([s + n for s, n in segments], dtype=dtype)
    slots = torch.arange(100, 100 + int((ends - starts).sum()) + 3)
    expected = table()
    taken = 0
    for row, (start, length) in zip(rows.tolist(), segments, strict=True):
        for column in range(start, start + length):
            expected[row, column] = slots[taken]
            taken += 1
    actual = table()
    cache_locs.assign_req_to_token_pool_cpu(rows, actual, starts, ends, slots, POOL_LEN)
    assert torch.equal(actual, expected)


@given(segments=segment_lists, dtype=index_dtypes)
@settings(deadline=None)
def test_assign_extend_cache_locs_reads_segments_and_leaves_the_tail(
    segments: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    rows = rows_for(len(segments)).to(dtype)
    starts = torch.tensor([s for s, _ in segments], dtype=dtype)
    ends = torch.tensor([s + n for s, n in segments], dtype=dtype)
    cells = [
        int(table()[row, column])
        for row, (start, length) in zip(rows.tolist(), segments, strict=True)
        for column in range(start, start + length)
    ]
    out = torch.full((len(cells) + 4,), -7)
    cache_locs.assign_extend_cache_locs_cpu(rows, table(), starts, ends, out, POOL_LEN)
    assert out.tolist() == cells + [-7] * 4


@pytest.mark.parametrize(
    "function",
    [cache_locs.assign_req_to_token_pool_cpu, cache_locs.assign_extend_cache_locs_cpu],
)
def test_too_short_slot_list_is_refused_by_name(function: object) -> None:
    one = torch.tensor([0])
    with pytest.raises(ValueError, match=r"out_cache_loc: expected at least 3 .* found 2"):
        function(one, table(), one, one + 3, torch.zeros(2, dtype=torch.int64), POOL_LEN)  # type: ignore[operator]


@pytest.mark.parametrize(("batch", "topk", "steps"), [(0, 1, 3), (1, 1, 1), (5, 1, 4), (3, 2, 3)])
def test_assign_draft_cache_locs_contiguous(batch: int, topk: int, steps: int) -> None:
    rows = rows_for(batch)
    lens = torch.arange(batch, dtype=torch.int32) * 3
    out = torch.full((batch * topk * steps,), -1)
    cache_locs.assign_draft_cache_locs_contiguous_cpu(
        rows, table(), lens, out, POOL_LEN, topk, steps
    )
    expected = [
        int(table()[row, int(start) + i])
        for row, start in zip(rows.tolist(), lens, strict=True)
        for i in range(topk * steps)
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize(("batch", "topk", "steps"), [(1, 1, 2), (4, 1, 3), (3, 3, 2)])
def test_build_draft_decode_metadata(batch: int, topk: int, steps: int) -> None:
    rows = rows_for(batch)
    lens = torch.arange(batch) * 4 + 1
    built = cache_locs.build_draft_decode_metadata_cpu(table(), rows, lens, topk, steps, POOL_LEN)
    assert built.shape == (batch * topk, POOL_LEN)
    for request in range(batch):
        for branch in range(topk):
            length = int(lens[request])
            line = table()[int(rows[request])]
            own = line[length + branch * steps : length + (branch + 1) * steps]
            expected = torch.cat([line[:length], own])
            assert torch.equal(built[request * topk + branch, : length + steps], expected)


@pytest.mark.parametrize(("batch", "stride"), [(0, 3), (1, 1), (5, 4), (7, 3)])
def test_fill_bonus_tokens_takes_the_last_accepted(batch: int, stride: int) -> None:
    tokens = torch.arange(batch * stride, dtype=torch.int32) * 11
    lens = torch.tensor([1 + i % stride for i in range(batch)], dtype=torch.int32)
    bonus = torch.full((batch,), -1, dtype=torch.int32)
    draft_inputs.fill_bonus_tokens_cpu(tokens, lens, bonus, stride)
    assert bonus.tolist() == [11 * (i * stride + int(lens[i]) - 1) for i in range(batch)]


@given(st.lists(st.integers(-1, 12), max_size=13), index_dtypes)
@settings(deadline=None)
def test_fill_accept_out_cache_loc_packs_in_order(rows: list[int], dtype: torch.dtype) -> None:
    slots = torch.arange(13) * 3 + 1
    out = torch.full((len(rows),), -9)
    draft_inputs.fill_accept_out_cache_loc_cpu(torch.tensor(rows, dtype=dtype), slots, out)
    kept = [3 * row + 1 for row in rows if row >= 0]
    assert out.tolist() == kept + [-9] * (len(rows) - len(kept))


@given(st.lists(st.integers(0, 5), max_size=6), st.booleans())
@settings(deadline=None)
def test_rotate_input_ids(lengths: list[int], select: bool) -> None:
    ids = torch.arange(sum(lengths)) + 1000
    lens = torch.tensor(lengths, dtype=torch.int64)
    starts = (lens.cumsum(0) - lens).int()
    new = torch.arange(len(lengths)) + 5
    # A chosen slot inside the segment, as a padded draft extend has it.
    chosen = starts.long() + (lens - 2).clamp(min=0)
    expected = ids.tolist()
    for i, length in enumerate(lengths):
        start = int(starts[i])
        if length:
            expected[start : start + length - 1] = expected[start + 1 : start + length]
            expected[int(chosen[i]) if select else start + length - 1] = int(new[i])
    draft_inputs.rotate_input_ids_cpu(ids, starts, lens, new, chosen if select else None)
    assert ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [3, 8], ids=["odd-bytes", "whole-words"])
def test_copy_all_layer_kv_cache_moves_rows_of_every_buffer(dtype: torch.dtype, width: int) -> None:
    buffers = [torch.randn(11, 1, width, dtype=dtype) for _ in range(5)]
    target = torch.tensor([0, 3, 4])
    source = torch.tensor([3, 4, 10])  # overlaps the target: all reads come before any write
    expected = [buffer.clone() for buffer in buffers]
    for old, new in zip(buffers, expected, strict=True):
        for t, s in zip(target.tolist(), source.tolist(), strict=True):
            new[t] = old[s]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    kv_copy.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


def test_copying_no_rows_touches_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    kv_copy.copy_all_layer_kv_cache_cpu(
        torch.tensor([0], dtype=torch.uint64), torch.tensor([8]), none, none
    )
