"""A verification in two halves computes the same rows over the same keys as in one."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core.batch_split import split_by_tokens
from sglang_ext.srt.parallel.two_batch_verify import _lengths, _share_request


def _visible(prefix: list[int], rows: list[int]) -> list[tuple[int, int]]:
    """(request, keys seen) of every row: a chain behind its prefix."""
    return [
        (r, p + i + 1) for r, (p, n) in enumerate(zip(prefix, rows, strict=True)) for i in range(n)
    ]


@given(
    rows=st.lists(st.integers(1, 6), max_size=6),
    threshold=st.sampled_from([0.0, 0.25, 0.48, 0.5]),
)
def test_halves_hold_every_row_once_with_its_keys(rows: list[int], threshold: float) -> None:
    prefix = [10 * (r + 1) for r in range(len(rows))]
    halves = split_by_tokens(rows, threshold)
    first_rows, second_rows = _lengths(rows, halves)
    assert (sum(first_rows), sum(second_rows)) == (halves.tokens, halves.second)
    shared = halves.inside is not None
    start = halves.requests - shared
    whole = [n + p for n, p in zip(prefix, rows, strict=True)]
    first = SimpleNamespace(
        seq_lens=torch.tensor(prefix[: halves.requests]),
        seq_lens_cpu=torch.tensor(whole[: halves.requests]),
    )
    second = SimpleNamespace(
        seq_lens=torch.tensor(prefix[start:]), seq_lens_cpu=torch.tensor(whole[start:])
    )
    if shared:
        inside = halves.inside or 0
        _share_request(first, second, inside, rows[start] - inside)
        assert first.seq_lens_cpu.tolist() == [
            p + n for p, n in zip(prefix, first_rows, strict=False)
        ]
        assert second.seq_lens_cpu.tolist() == whole[start:]
    together = _visible(first.seq_lens.tolist(), first_rows)
    together += [(r + start, k) for r, k in _visible(second.seq_lens.tolist(), second_rows)]
    assert together == _visible(prefix, rows)


def test_lengths_that_leave_rows_out_take_the_first_part_as_prefix() -> None:
    """NEXTN's do: of a request of prefix 20 whose 4 rows are cut after 1."""
    first = SimpleNamespace(seq_lens=torch.tensor([10, 20]), seq_lens_cpu=torch.tensor([10, 20]))
    second = SimpleNamespace(seq_lens=torch.tensor([20]), seq_lens_cpu=torch.tensor([20]))
    _share_request(first, second, 1, 0)
    assert second.seq_lens.tolist() == second.seq_lens_cpu.tolist() == [21]
    assert second.seq_lens_sum == 21
    assert first.seq_lens_cpu.tolist() == [10, 20]


def test_a_lone_request_is_cut_inside_and_a_lone_row_leaves_a_half_empty() -> None:
    assert _lengths([5], split_by_tokens([5])) == ([2], [3])
    assert _lengths([1], split_by_tokens([1])) == ([], [1])
    assert _lengths([], split_by_tokens([])) == ([], [])
