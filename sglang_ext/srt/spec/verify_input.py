"""SGLang's verify input, with a number of rows per request of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor


@dataclass
class RaggedVerifyInput(DFlashVerifyInput):
    """`verify_lens[r]` rows belong to request r; rows lie one request after the other.

    draft_token_num: rows of the widest request, which is what buffers are sized by.
    """

    verify_lens: list[int] = field(default_factory=list)


def make_verify_input(ids: Tensor, positions: Tensor, rows: list[int]) -> RaggedVerifyInput:
    """ids [total] int64, positions [total] int64, rows per request -> the target's verify input."""
    return RaggedVerifyInput(
        draft_token=ids,
        positions=positions,
        draft_token_num=max(rows, default=1),
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        # Rows are counted one by one: `set_rows` gives every DP rank's number of them.
        num_tokens_per_req=1,
        verify_lens=rows,
    )


def make_block_input(rows: int, device: torch.device) -> DFlashVerifyInput:
    """What the draft's own forward carries: `rows` query rows per request, nothing captured."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return DFlashVerifyInput(
        draft_token=empty,
        positions=empty,
        draft_token_num=rows,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
