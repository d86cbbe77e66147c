"""A mixture layer of DeepSeek-V3.2 in SGLang's stages, for two-batch overlap.

    SGLang   stages of one layer, called with the state and what the stage before returned
    a layer  attend, route, send   |   experts   |   receive, hand on
A bar lets the other half of the batch run. Dense layers come before the split.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.batch_overlap.operations import YieldOperation
from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from torch import Tensor

from sglang_ext.srt.parallel.seen import note
from sglang_ext.srt.parallel.two_batch import kept

# Stages that the second half runs behind the first, as SGLang has it.
_BEHIND_IN_DECODE = 2


def layer_strategy(layer: Any, forward_mode: Any) -> OperationsStrategy:
    """The layer's operations, in the order of one half."""
    prefill = forward_mode.is_extend_without_speculative()
    note("two-batch split of a prefill" if prefill else "two-batch split of a decode")
    steps = _Steps(layer)
    between = YieldOperation()
    return OperationsStrategy(
        operations=[steps.op_attend, between, steps.op_experts, between, steps.op_receive, between],
        tbo_delta_stages=0 if prefill else _BEHIND_IN_DECODE,
    )


class _Steps:
    """What the model says of a half beside its batch.

    forward_batch.rotation: (cos, sin) of the half's rows, each [rows, rope / 2].
    forward_batch.layers_to_capture: layers whose input a draft reads.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def op_attend(
        self,
        state: Any,
        positions: Tensor,
        hidden_states: Any,
        forward_batch: Any,
        tbo_subbatch_index: int | None = None,
        **_: Any,
    ) -> None:
        layer = self.layer
        into = kept(forward_batch) if layer.layer_id in forward_batch.layers_to_capture else None
        x = layer.attn_boundary.prepare(hidden_states, forward_batch, capture_gathered=into)
        if x.shape[0]:
            x = layer.self_attn(x, *forward_batch.rotation, forward_batch)
        x = layer.attn_boundary.finish(x, forward_batch)
        x = layer.ffn_boundary.prepare(x, forward_batch)
        with get_global_expert_distribution_recorder().with_current_layer(layer.layer_id):
            layer.mlp.send(x, tbo_subbatch_index)
        state.update(
            {"x": x, "half": tbo_subbatch_index, "batch": forward_batch, "positions": positions}
        )

    def op_experts(self, state: Any) -> None:
        self.layer.mlp.compute(state.half)

    def op_receive(self, state: Any) -> dict[str, Any]:
        batch, half = state.pop("batch"), state.pop("half")
        y = self.layer.mlp.receive(state.pop("x"), half)
        return {
            "hidden_states": self.layer.ffn_boundary.complete_now(y, batch),
            "positions": state.pop("positions"),
            "forward_batch": batch,
            "tbo_subbatch_index": half,
        }
