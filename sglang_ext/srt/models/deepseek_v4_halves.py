"""DeepSeek-V4's layers over two halves of a batch: one half's rows travel while the other computes.

    SGLang   execute_overlapped_operations(inputs of both halves, operations, delta stages)
    a layer  attend, route, send   |   experts   |   receive, write back
A bar lets the other half run. What a half reads of the other's tokens (prefix rows of a request
that was cut, blocks that lie across the cut) was written by the first half in the same layer, whose
attention runs before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.batch_overlap.operations import YieldOperation, execute_overlapped_operations
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from torch import Tensor

from sglang_ext.kernels.hyper_connection import HcMix, hc_post
from sglang_ext.srt.models.deepseek_v4_attention import Turn
from sglang_ext.srt.parallel.seen import note

if TYPE_CHECKING:
    from sglang_ext.srt.models.deepseek_v4 import Decoder

# Stages that the second half runs behind the first, as SGLang has it.
_BEHIND_IN_DECODE = 2


@dataclass
class Half:
    """One half under way.

    streams: [rows, n, hidden]. mix, sent: of the layer at hand, between its stages.
    """

    index: int
    batch: Any
    streams: Tensor
    turns: dict[bool, Turn]
    captured: list[Tensor] = field(default_factory=list)
    mix: HcMix | None = None
    sent: Tensor | None = None


def run_halves(decoder: Decoder, streams: Tensor, batch: Any) -> tuple[Tensor, list[Tensor]]:
    """Streams of a whole batch [rows, n, hidden] through all layers, and what was captured."""
    prefill = batch.global_forward_mode.is_extend_without_speculative()
    note("two-batch split of a prefill" if prefill else "two-batch split of a decode")
    halves = [_half(decoder, i, child, streams) for i, child in enumerate(batch.tbo_children)]
    steps = [step for layer_id in range(len(decoder.layers)) for step in _layer(decoder, layer_id)]
    execute_overlapped_operations(
        inputs_arr=[{"forward_batch": half.batch, "half": half} for half in halves],
        operations_arr=[steps, steps],
        delta_stages=[0, 0 if prefill else _BEHIND_IN_DECODE],
    )
    captured = zip(*(half.captured for half in halves), strict=True)
    return _whole(halves, [h.streams for h in halves], streams), [
        _whole(halves, list(parts), streams) for parts in captured
    ]


def _half(decoder: Decoder, index: int, child: Any, streams: Tensor) -> Half:
    first, last = child.tbo_parent_token_range
    own = streams.new_zeros(child.input_ids.shape[0], *streams.shape[1:])
    own[: last - first] = streams[first:last]
    return Half(index, child, own, decoder.turns(child.positions))


def _whole(halves: list[Half], parts: list[Tensor], like: Tensor) -> Tensor:
    """The halves' rows in the batch's order; rows of neither, which are padding, are 0."""
    out = parts[0].new_zeros(like.shape[0], *parts[0].shape[1:])
    for half, part in zip(halves, parts, strict=True):
        first, last = half.batch.tbo_parent_token_range
        out[first:last] = part[: last - first]
    return out


def _layer(decoder: Decoder, layer_id: int) -> list[Any]:
    """The operations of one layer, between the halves' turns."""
    layer: Any = decoder.layers[layer_id]
    compressed = bool(decoder.config.compress_ratios[layer_id])

    def attend(half: Half) -> None:
        batch, turn = half.batch, half.turns[compressed]
        mix = layer.hc_pre("hc_attn", half.streams)
        y = layer.attn(layer.attn_norm(mix.x), turn, batch.positions, batch)
        half.streams = hc_post(y, half.streams, mix.post, mix.comb)
        half.mix = layer.hc_pre("hc_ffn", half.streams)
        x = layer.ffn_norm(half.mix.x)
        half.sent = layer.ffn.send(x, batch.input_ids, batch, half.index)

    def experts(half: Half) -> None:
        layer.ffn.compute(half.index)

    def receive(half: Half) -> None:
        assert half.mix is not None
        assert half.sent is not None
        rows = half.streams.shape[0]
        y = layer.ffn.receive(half.sent, rows, half.batch, half.index)
        half.streams = hc_post(y, half.streams, half.mix.post, half.mix.comb)
        half.mix = half.sent = None
        decoder.capture(layer_id, half.streams, half.captured)

    steps: list[Any] = []
    for step in (attend, experts, receive):
        steps += [_operation(layer_id, step), YieldOperation()]
    return steps


def _operation(layer_id: int, step: Callable[[Half], None]) -> Callable[..., dict[str, Any]]:
    def run(state: Any, half: Half, **_: Any) -> dict[str, Any]:
        with get_global_expert_distribution_recorder().with_current_layer(layer_id):
            step(half)
        return {"half": half}

    run.__name__ = f"op_{step.__name__}"
    return run
