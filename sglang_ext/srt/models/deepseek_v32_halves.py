"""A mixture layer of DeepSeek-V3.2 in steps, for two-batch overlap.

    SGLang   operations of one layer, called with the state and what the one before returned
    here     the layer's steps, in the order of `core.overlap`
Dense layers come before the split.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from torch import Tensor

from sglang_ext.srt.parallel.layer_order import Step, mixture_order
from sglang_ext.srt.parallel.two_batch import kept


def layer_strategy(layer: Any, forward_mode: Any) -> OperationsStrategy:
    """The layer's operations, in the order of one half.

    What the model says of a half beside its batch:
    forward_batch.rotation: (cos, sin) of the half's rows, each [rows, rope / 2].
    forward_batch.layers_to_capture: layers whose input a draft reads.
    """
    mlp = layer.mlp

    def prepare(
        state: Any,
        positions: Tensor,
        hidden_states: Any,
        forward_batch: Any,
        tbo_subbatch_index: int | None = None,
        **_: Any,
    ) -> None:
        into = kept(forward_batch) if layer.layer_id in forward_batch.layers_to_capture else None
        x = layer.attn_boundary.prepare(hidden_states, forward_batch, capture_gathered=into)
        state.update(
            {"x": x, "half": tbo_subbatch_index, "batch": forward_batch, "positions": positions}
        )

    def attend(state: Any) -> None:
        batch, x = state.batch, state.pop("x")
        if x.shape[0]:
            x = layer.self_attn(x, *batch.rotation, batch)
        x = layer.attn_boundary.finish(x, batch)
        state.rows = layer.ffn_boundary.prepare(x, batch)

    def gate(state: Any) -> None:
        state.update({"choice": mlp.choice(state.rows), "there": state.rows})

    def shared_experts(state: Any) -> None:
        there = state.pop("there")
        state.shared = mlp.shared_experts(there) if there.shape[0] else there

    def output(state: Any) -> dict[str, Any]:
        batch = state.pop("batch")
        y = state.pop("routed") + state.pop("shared")
        return {
            "hidden_states": layer.ffn_boundary.complete_now(y, batch),
            "positions": state.pop("positions"),
            "forward_batch": batch,
            "tbo_subbatch_index": state.pop("half"),
        }

    steps: dict[str, Step] = {
        "prepare": prepare,
        "attention": attend,
        "gate": gate,
        "shared_experts": shared_experts,
        "output": output,
    }
    return mixture_order(layer.layer_id, mlp.experts, forward_mode, steps)
