"""The fast argmax finds what torch.argmax finds, ties and odd sizes included."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.spec.argmax import row_argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "size"),
    [(1, 49152), (8, 16384), (3, 151936), (2, 50257), (5, 7), (0, 49152), (300, 192)],
    ids=["one-row", "block", "multiple-of-128", "prime-like", "tiny", "idle", "many-rows"],
)
def test_the_first_largest_value_wins(rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few distinct values: every row has many ties for the maximum.
    values = torch.randint(-4, 4, (rows, size), generator=generator).to(dtype)
    expected = [row.index(max(row)) for row in values.tolist()]
    assert row_argmax(values).tolist() == expected


def test_rows_need_not_be_contiguous() -> None:
    values = torch.randn(6, 2, 49152, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_argmax(values[:, 1]), values[:, 1].argmax(-1))
    padded = values[:, 0, :48128]
    assert torch.equal(row_argmax(padded), padded.argmax(-1))


def test_minus_infinity_everywhere_is_index_zero() -> None:
    assert row_argmax(torch.full((2, 49152), float("-inf"))).tolist() == [0, 0]
