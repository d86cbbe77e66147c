"""Two-batch overlap without SM counts: the same operations in the same order, on any device.

SGLang's prefill strategies ask CUDA how many SMs its GEMMs may take while a dispatch runs. Nothing
of the schedule depends on that number. Off CUDA nothing runs side by side either, so the schedule
changes no speed: what it is good for there is to hold its results to those of one batch.

A speculative draft reads the inputs of some of the target's layers. SGLang keeps them in a forward
of one batch only; here each half keeps its own, and they are put together in the batch's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.batch_overlap.operations import YieldOperation
from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from torch import Tensor

from sglang_ext.srt.parallel.seen import note


def prefill_strategy(layer: Any) -> OperationsStrategy:
    """A MoE decoder layer of one half of the batch; a yield lets the other half run."""
    note("two-batch split of a prefill")
    attention, mlp = layer.self_attn, layer.mlp
    # Rows travel to the experts between the first pair of yields, back between the second.
    before = [
        layer.op_comm_prepare_attn,
        attention.op_prepare,
        attention.op_core,
        layer.op_comm_prepare_mlp,
        mlp.op_gate,
        mlp.op_select_experts,
        mlp.op_dispatch_a,
    ]
    experts = [mlp.op_dispatch_b, mlp.op_experts, mlp.op_combine_a]
    shared = [mlp.op_shared_experts] if hasattr(mlp, "op_shared_experts") else []
    after = [*shared, mlp.op_combine_b, mlp.op_output, layer.op_comm_postprocess_layer]
    steps = [*before, YieldOperation(), *experts, YieldOperation(), *after]
    return OperationsStrategy(operations=steps, tbo_delta_stages=0)


def keeping_features(strategy: OperationsStrategy, layer: Any) -> OperationsStrategy:
    """The strategy of `layer`, whose input is kept where a draft reads it."""
    if getattr(layer, "_is_layer_to_capture", False):
        keep = _prepare_and_keep(layer)
        strategy.operations = [
            keep if step == layer.op_comm_prepare_attn else step for step in strategy.operations
        ]
    return strategy


def _prepare_and_keep(layer: Any) -> Callable[..., None]:
    """Qwen3-MoE's `op_comm_prepare_attn`, with the boundary's capture switched on."""

    def op_prepare_and_keep(
        state: Any,
        positions: Tensor,
        hidden_states: Tensor,
        forward_batch: Any,
        tbo_subbatch_index: int | None = None,
    ) -> None:
        state.hidden_states_after_comm_pre_attn = layer.attn_boundary.prepare(
            hidden_states, forward_batch, capture_gathered=kept(forward_batch)
        )
        state.forward_batch = forward_batch
        state.positions = positions
        state.tbo_subbatch_index = tbo_subbatch_index

    return op_prepare_and_keep


def kept(half: Any) -> AuxHiddenStateList:
    """The layer inputs that a half has kept so far, each [rows of the half, hidden]."""
    if not hasattr(half, "kept_features"):
        half.kept_features = AuxHiddenStateList()
    return half.kept_features


def features_of_halves(batch: Any) -> AuxHiddenStateList:
    """Layer inputs of both halves -> per layer [rows of the batch, hidden], in its order."""
    rows = batch.input_ids.shape[0]
    together = AuxHiddenStateList()
    halves = [(child.tbo_parent_token_range, kept(child)) for child in batch.tbo_children]
    for pieces in zip(*(inputs for _, inputs in halves), strict=True):
        whole = pieces[0].new_zeros((rows, *pieces[0].shape[1:]))
        for ((first, last), _), piece in zip(halves, pieces, strict=True):
            whole[first:last] = piece[: last - first]
        together.append(whole)
    return together
