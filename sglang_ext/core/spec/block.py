"""Draft block conventions: which query row predicts which token, and where the rows stand.

The anchor is the last committed token, at position `start`. Two conventions are in use.

    anchor predicts (DSpark, DeepSpec's dflash_*_block7): row k stands at start+k and predicts
        the token at start+k+1; gamma rows, the anchor row included, give gamma drafts
    mask row predicts itself (z-lab DFlash; DSpark with sample_from_anchor false): row k >= 1
        stands at start+k and predicts the token at start+k; the anchor row predicts nothing,
        so gamma drafts take gamma+1 rows
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ext.core.spec.types import VerifyPlan


@dataclass(frozen=True)
class BlockLayout:
    """Shape of a draft block.

    gamma:           drafted tokens per block
    anchor_predicts: whether the anchor row predicts the first draft
    """

    gamma: int
    anchor_predicts: bool

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(
                f"gamma: expected at least 1 drafted token per block, found {self.gamma}; "
                "turn speculation off to draft nothing"
            )

    @classmethod
    def dspark(cls, block_size: int, sample_from_anchor: bool = True) -> BlockLayout:
        """DSpark's `block_size` counts drafts; `sample_from_anchor` is a checkpoint key."""
        return cls(gamma=block_size, anchor_predicts=sample_from_anchor)

    @classmethod
    def dflash(cls, block_size: int) -> BlockLayout:
        """z-lab's `block_size` counts rows, anchor included: one draft fewer."""
        if block_size < 2:
            raise ValueError(
                f"block_size: expected at least 2 (anchor and one mask), found {block_size}; "
                "use the value the draft was trained with"
            )
        return cls(gamma=block_size - 1, anchor_predicts=False)

    @property
    def first_predicting_row(self) -> int:
        return 0 if self.anchor_predicts else 1

    @property
    def query_rows(self) -> int:
        """Rows of the draft's forward per request."""
        return self.gamma + self.first_predicting_row

    def block_ids(self, anchors: Tensor, mask_token_id: int) -> Tensor:
        """Input ids of the block.

        anchors: [R] int64  ->  [R, query_rows] int64, the anchor then masks
        """
        ids = anchors.new_full((anchors.shape[0], self.query_rows), mask_token_id)
        ids[:, 0] = anchors
        return ids

    def block_positions(self, starts: Tensor) -> Tensor:
        """Absolute positions of the block.

        starts: [R] int64, position of the anchor  ->  [R, query_rows] int64
        """
        return starts[:, None] + torch.arange(self.query_rows, device=starts.device)

    def predictions(self, rows: Tensor) -> Tensor:
        """Keeps the rows that predict: row k of the result belongs to draft k+1.

        rows: [R, query_rows, ...]  ->  [R, gamma, ...], a view
        """
        return rows[:, self.first_predicting_row :]


def verify_ids(plan: VerifyPlan, anchors: Tensor, drafts: Tensor) -> Tensor:
    """Input ids of the ragged verification.

    anchors: [R] int64, drafts: [R, G] int64  ->  [total] int64
    """
    window = torch.cat((anchors[:, None], drafts), dim=1)
    if plan.uniform and plan.total == window.numel():
        return window.view(-1)
    return window[plan.row_request, plan.row_offset]


def verify_positions(plan: VerifyPlan, starts: Tensor) -> Tensor:
    """Absolute positions of the ragged verification.

    starts: [R] int64, position of the anchor  ->  [total] int64
    """
    return starts[plan.row_request] + plan.row_offset
