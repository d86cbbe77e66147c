"""DeepSeek-V4's layers over two halves of a batch: one half's rows travel while the other computes.

    SGLang   execute_overlapped_operations(inputs of both halves, operations, delta stages)
    here     a layer's steps, in the order of `core.overlap`
What a half reads of the other's tokens (prefix rows of a request that was cut, blocks that lie
across the cut) was written by the first half in the same layer, whose attention runs before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.batch_overlap.operations import execute_overlapped_operations
from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from torch import Tensor

from sglang_ext.kernels.hyper_connection import hc_post
from sglang_ext.srt.models.deepseek_v4_attention import Turn
from sglang_ext.srt.parallel.layer_order import Step, mixture_order

if TYPE_CHECKING:
    from sglang_ext.srt.models.deepseek_v4 import Decoder


@dataclass
class Half:
    """One half under way; streams: [rows, n, hidden]."""

    index: int
    batch: Any
    streams: Tensor
    turns: dict[bool, Turn]
    captured: list[Tensor] = field(default_factory=list)


def run_halves(decoder: Decoder, streams: Tensor, batch: Any) -> tuple[Tensor, list[Tensor]]:
    """Streams of a whole batch [rows, n, hidden] through all layers, and what was captured."""
    halves = [_half(decoder, i, child, streams) for i, child in enumerate(batch.tbo_children)]
    order = OperationsStrategy.concat(
        [_layer(decoder, i, batch.global_forward_mode) for i in range(len(decoder.layers))]
    )
    execute_overlapped_operations(
        inputs_arr=[{"forward_batch": half.batch, "half": half} for half in halves],
        operations_arr=[order.operations, order.operations],
        delta_stages=[0, order.tbo_delta_stages],
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


def _layer(decoder: Decoder, layer_id: int, forward_mode: Any) -> OperationsStrategy:
    """The operations of one layer, between the halves' turns."""
    layer: Any = decoder.layers[layer_id]
    ffn = layer.ffn
    compressed = bool(decoder.config.compress_ratios[layer_id])

    def prepare(state: Any, half: Half, **_: Any) -> None:
        mix = layer.hc_pre("hc_attn", half.streams)
        x = layer.attn_norm(mix.x)
        state.update({"own": half, "half": half.index, "mix": mix, "x": x})

    def attend(state: Any) -> None:
        half, mix = state.own, state.pop("mix")
        y = layer.attn(state.pop("x"), half.turns[compressed], half.batch.positions, half.batch)
        half.streams = hc_post(y, half.streams, mix.post, mix.comb)
        state.mix = layer.hc_pre("hc_ffn", half.streams)
        state.x = layer.ffn_norm(state.mix.x)

    def gate(state: Any) -> None:
        batch = state.own.batch
        there, choice = ffn.routed(state.pop("x"), batch.input_ids, batch)
        state.update({"there": there, "rows": there, "choice": choice})

    def shared_experts(state: Any) -> None:
        state.shared = ffn.shared_experts(state.pop("there"))

    def output(state: Any) -> dict[str, Any]:
        half, mix, _ = state.pop("own"), state.pop("mix"), state.pop("half")
        y = state.pop("routed") + state.pop("shared")
        y = ffn.rows.back(y, half.streams.shape[0], half.batch)
        half.streams = hc_post(y, half.streams, mix.post, mix.comb)
        decoder.capture(layer_id, half.streams, half.captured)
        return {"half": half}

    steps: dict[str, Step] = {
        "prepare": prepare,
        "attention": attend,
        "gate": gate,
        "shared_experts": shared_experts,
        "output": output,
    }
    return mixture_order(layer_id, ffn.experts, forward_mode, steps)
