"""Both block conventions map to the tokens right after the anchor."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.spec.block import BlockLayout, verify_ids, verify_positions
from sglang_ext.core.spec.types import VerifyPlan

MASK = 99


@pytest.mark.parametrize(
    ("layout", "rows", "gamma"),
    [
        (BlockLayout.dspark(7), 7, 7),
        (BlockLayout.dspark(5), 5, 5),
        (BlockLayout.dspark(7, sample_from_anchor=False), 8, 7),
        (BlockLayout.dflash(16), 16, 15),
        (BlockLayout.dflash(2), 2, 1),
    ],
    ids=["dspark", "dspark-v4", "dspark-anchor-dropped", "z-lab", "smallest"],
)
def test_a_draft_that_emits_slot_indices_drafts_the_slots_after_the_anchor(
    layout: BlockLayout, rows: int, gamma: int
) -> None:
    starts, anchors = torch.tensor([40, 7, 0]), torch.tensor([1, 2, 3])
    ids, positions = layout.block_ids(anchors, MASK), layout.block_positions(starts)
    assert ids.shape == positions.shape == (3, rows)
    assert ids[:, 0].tolist() == [1, 2, 3]
    assert (ids[:, 1:] == MASK).all()
    # What each row was trained to predict, as the index of the slot.
    emitted = positions + 1 if layout.anchor_predicts else positions
    expected = starts[:, None] + 1 + torch.arange(gamma)
    assert torch.equal(layout.predictions(emitted), expected)


def test_predictions_do_not_copy() -> None:
    rows = torch.zeros(2, 8, 4)
    kept = BlockLayout.dflash(8).predictions(rows)
    assert kept.data_ptr() == rows[:, 1:].data_ptr()


@pytest.mark.parametrize("lengths", [[3, 3], [3, 0, 2], [0], [0, 0]])
def test_ragged_verification_holds_anchor_and_admitted_drafts(lengths: list[int]) -> None:
    requests = len(lengths)
    anchors = torch.arange(requests) + 1000
    drafts = torch.arange(requests * 3).view(requests, 3)
    starts = torch.arange(requests) * 100
    plan = VerifyPlan.of(lengths)
    ids, positions = [], []
    for r, n in enumerate(lengths):
        ids += [1000 + r, *drafts[r, :n].tolist()]
        positions += [100 * r + j for j in range(n + 1)]
    assert verify_ids(plan, anchors, drafts).tolist() == ids
    assert verify_positions(plan, starts).tolist() == positions


def test_degenerate_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma.*found 0"):
        BlockLayout.dspark(0)
    with pytest.raises(ValueError, match=r"block_size.*found 1"):
        BlockLayout.dflash(1)
