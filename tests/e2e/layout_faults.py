"""Faults of parallel layouts, planted like those of `faults`.

Each must change an answer, or what is accepted of a draft.
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
    "expert weights stay": _expert_weights_stay,
    "CP mask shifted": _cp_mask_shifted,
    "second half without the first": _second_half_without_first,
    "features in the order of ranks": _features_in_rank_order,
    "features of the first half alone": _features_of_first_half,
}
