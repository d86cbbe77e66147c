"""Faults of parallel layouts, planted like those of `faults`.

Each must change an answer, how sure it is, or what is accepted of a draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _combine_without_other_ranks() -> None:
    """What the experts of other ranks computed never comes back."""
    from sglang_ext.srt.parallel.expert_exchange import ExpertExchange

    original = ExpertExchange.begin_collect

    def faulty(self: Any, outputs: Tensor, journey: Any) -> Tensor:
        rank, received = self.buffer.rank, journey.handle.received
        first = sum(received[:rank])
        mine = slice(first, first + received[rank])
        kept = outputs.new_zeros(outputs.shape)
        kept[mine] = outputs[mine]
        return original(self, kept, journey)

    ExpertExchange.begin_collect = faulty  # type: ignore[method-assign]


def _slots_go_back_sorted() -> None:
    """In low latency rows go back in the order of slots, not in that in which they came."""
    from sglang_ext.srt.parallel.deep_ep_low_latency import LowLatencyExchange

    original = LowLatencyExchange.combine

    def faulty(self: Any, traffic: Any, x: Tensor, ids: Tensor, weights: Tensor, way: Any) -> Any:
        way = dataclasses.replace(way, slots=way.slots.sort().values)
        return original(self, traffic, x, ids, weights, way)

    LowLatencyExchange.combine = faulty  # type: ignore[method-assign]


def _rows_leave_after_first_expert() -> None:
    """Under single-batch overlap a row goes back with the first of its experts, not the last."""
    from sglang_ext.core.dispatch import ExpertBlocks

    def faulty(self: Any, local: Tensor) -> Tensor:
        first = local.long().masked_fill(local < 0, self.per_rank).amin(dim=1)
        return torch.div(first % self.per_rank * self.parts, self.per_rank, rounding_mode="floor")

    ExpertBlocks.part_of = faulty  # type: ignore[method-assign]


def _expert_weights_stay() -> None:
    """The map of experts changes and their weights do not move."""
    from sglang.srt.eplb import expert_location_updater

    expert_location_updater._update_expert_weights = lambda **_: {}


def _cp_mask_shifted() -> None:
    """Under context parallelism every row sees one key too few."""
    from sglang_ext.srt.attention import portable
    from sglang_ext.srt.parallel import context

    def faulty(batch: Any) -> Any:
        local = context.local_rows(batch)
        if local is None:
            return None
        least = [(rows - 1) * local.stride + 1 for rows in local.rows]
        keys = [max(k - 1, n) for k, n in zip(local.keys, least, strict=True)]
        return dataclasses.replace(local, keys=keys)

    portable.local_rows = faulty


def _compressor_rows_lost() -> None:
    """Under interleaved CP the last rank's rows do not reach DeepSeek-V4's compressors."""
    from sglang.srt.layers.cp.base import get_cp_strategy

    from sglang_ext.srt.attention.dsv4_inputs import Dsv4Inputs

    original = Dsv4Inputs.with_rows

    def faulty(self: Any, change: Any) -> Any:
        whole = original(self, change)
        if whole.new is None:
            return whole
        size, raw = get_cp_strategy().cp_size, whole.new.raw.clone()
        raw[size - 1 :: size] = 0
        return dataclasses.replace(whole, new=dataclasses.replace(whole.new, raw=raw))

    Dsv4Inputs.with_rows = faulty  # type: ignore[method-assign]


def _stage_without_residual() -> None:
    """A pipeline stage starts from what the last layer added, not from the sum so far."""
    from sglang.srt.layers.layer_boundary import stage

    original = stage.from_pp

    def faulty(tensors: Any, **options: Any) -> Any:
        hidden, residual = original(tensors, **options)
        return hidden, torch.zeros_like(residual)

    stage.from_pp = faulty


def _second_half_without_first() -> None:
    """The request at the cut of a verification starts anew in the second half."""
    from sglang_ext.srt.parallel import two_batch_verify

    two_batch_verify._share_request = lambda *_: None


def _features_in_rank_order() -> None:
    """Under interleaved CP a draft gets the prompt's features as the ranks held them."""
    from sglang.srt.model_executor.runner import eager_runner

    original = eager_runner.cp_gather_after_forward

    def faulty(x: Any, batch: Any, stream: Any = None) -> Any:
        whole = original(x, batch, stream)
        # The features come behind the last hidden states.
        if not hasattr(batch, "planted"):
            batch.planted = True
            return whole
        return torch.cat([whole[0::2], whole[1::2]])

    eager_runner.cp_gather_after_forward = faulty


def _features_of_first_half() -> None:
    """Under two-batch overlap the second half's features are lost on their way to the draft."""
    from sglang_ext.srt.parallel import two_batch

    original = two_batch.features_of_halves

    def faulty(batch: Any) -> Any:
        together = original(batch)
        first, last = batch.tbo_children[1].tbo_parent_token_range
        for features in together:
            features[first:last] = 0
        return together

    two_batch.features_of_halves = faulty


LAYOUT_FAULTS: dict[str, Callable[[], None]] = {
    "combine without other ranks": _combine_without_other_ranks,
    "slots go back sorted": _slots_go_back_sorted,
    "rows leave after the first expert": _rows_leave_after_first_expert,
    "expert weights stay": _expert_weights_stay,
    "CP mask shifted": _cp_mask_shifted,
    "compressor rows lost": _compressor_rows_lost,
    "stage without residual": _stage_without_residual,
    "second half without the first": _second_half_without_first,
    "features in the order of ranks": _features_in_rank_order,
    "features of the first half alone": _features_of_first_half,
}
