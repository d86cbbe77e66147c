"""Logits of a head sharded over attention TP are gathered with the vocabulary's padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.layers.logits_processor"


def _gather(original: Callable[..., Tensor], processor: Any, logits: Tensor) -> Tensor:
    from sglang.srt.runtime_context import get_parallel

    if logits.shape[-1] * processor.attn_tp_size == processor.vocab_size:
        return original(processor, logits)
    whole = get_parallel().attn_tp_group.all_gather(logits, dim=-1)
    return whole[:, : processor.vocab_size].contiguous()


def _apply() -> None:
    hook(f"{_MODULE}.LogitsProcessor._gather_attn_tp_logits", _gather, Kind.AROUND)


PATCH = Patch(
    name="padded-head",
    target=f"{_MODULE}:LogitsProcessor._gather_attn_tp_logits",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.WORKER,
    why="with --enable-dp-lm-head and attention TP it expects vocab / ranks columns from each "
    "rank, but a shard carries the padding of the vocabulary to a multiple of 64 per rank",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/"
    "logits_processor.py",
    signature="(self, logits: torch.Tensor) -> torch.Tensor",
    until="the gather takes the shards at the width they have",
    apply=_apply,
)
