"""The ragged layout of a verification, and the small types around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core.spec.types import VerifyPlan, VerifyResult

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=9)


@given(LENGTHS)
def test_rows_are_grouped_by_request_with_the_anchor_first(lengths: list[int]) -> None:
    plan = VerifyPlan.of(lengths)
    expected = [(r, j) for r, n in enumerate(lengths) for j in range(n + 1)]
    assert list(zip(plan.row_request.tolist(), plan.row_offset.tolist(), strict=True)) == expected
    assert plan.total == len(expected) == sum(lengths) + len(lengths)
    assert plan.cu_rows.tolist() == plan.cu_list
    assert plan.uniform == (len(set(lengths)) == 1)


@given(LENGTHS)
def test_a_plan_from_a_tensor_equals_one_from_integers(lengths: list[int]) -> None:
    plan = VerifyPlan(torch.tensor(lengths))
    assert plan.counts == lengths
    assert plan.cu_list == VerifyPlan.of(lengths).cu_list


@given(LENGTHS, st.integers(0, 2))
def test_padded_keeps_every_row_at_its_place(lengths: list[int], slack: int) -> None:
    plan = VerifyPlan.of(lengths)
    values = torch.arange(plan.total * 3).view(plan.total, 3)
    width = plan.max_length + 1 + slack
    table = plan.padded(values, width)
    assert table.shape == (len(lengths), width, 3)
    for r, n in enumerate(lengths):
        first = plan.cu_list[r]
        assert torch.equal(table[r, : n + 1], values[first : first + n + 1])


def test_an_empty_batch_is_a_plan() -> None:
    plan = VerifyPlan.of([])
    assert (plan.total, plan.max_length, plan.uniform) == (0, 0, True)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths.*-1"):
        VerifyPlan.of([1, -1])


def test_the_bonus_is_the_last_committed_token() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, -1, -1]])
    result = VerifyResult(torch.tensor([2, 0]), tokens)
    assert result.bonus.tolist() == [7, 8]
    assert result.commit_lengths.tolist() == [3, 1]
