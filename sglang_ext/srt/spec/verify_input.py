"""SGLang's verify input, with a number of rows per request of its own, and passes over a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from sglang_ext.srt.spec.live import LiveBatch


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


def block_batch(
    runner: Any,
    live: LiveBatch,
    ids: Tensor,
    positions: Tensor,
    info: DFlashVerifyInput,
    algorithm: Any = None,
) -> ForwardBatch:
    """A pass of `runner` over as many rows of each request, from its anchor on, K/V planned.

    ids, positions: [R, rows] int64
    """
    rows = ids.shape[1]
    slots = live.slots(runner.req_to_token_pool.req_to_token, rows).flatten()
    ends = live.prefix_cpu + rows
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(live),
        input_ids=ids.flatten(),
        req_pool_indices=live.pool_rows,
        seq_lens=live.prefix,
        out_cache_loc=slots,
        seq_lens_sum=int(ends.sum()),
        seq_lens_cpu=ends,
        positions=positions.flatten(),
        spec_algorithm=algorithm,
        spec_info=info,
        capture_hidden_mode=info.capture_hidden_mode,
        global_num_token_non_padded_cpu=ids.numel(),
    )
    plan = runner.kv_index_translator.plan(
        req_pool_indices=live.pool_rows,
        seq_lens=live.prefix,
        seq_lens_cpu=live.prefix_cpu,
        write_virtual=slots,
        read_extent=rows,
    )
    plan.bind(batch, runner.kv_index_translator)
    return batch
