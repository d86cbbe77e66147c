"""Two-batch overlap without SM counts: the same operations in the same order, on any device.

SGLang's prefill strategies ask CUDA how many SMs its GEMMs may take while a dispatch runs. Nothing
of the schedule depends on that number. Off CUDA a transfer runs beside computation as far as its
process group carries it by itself, as gloo does on threads of its own.

A speculative draft reads the inputs of some of the target's layers. SGLang keeps them in a forward
of one batch only; here each half keeps its own, and they are put together in the batch's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from torch import Tensor

from sglang_ext.srt.parallel.layer_order import prefill_order
from sglang_ext.srt.parallel.seen import note


def prefill_strategy(layer: Any) -> OperationsStrategy:
    """A MoE decoder layer of SGLang's over one half of the batch."""
    attention, mlp = layer.self_attn, layer.mlp
    steps = {
        "prepare": [layer.op_comm_prepare_attn, attention.op_prepare],
        "attention": [attention.op_core, layer.op_comm_prepare_mlp],
        "gate": [mlp.op_gate, mlp.op_select_experts],
        "dispatch_a": [mlp.op_dispatch_a],
        "dispatch_b": [mlp.op_dispatch_b],
        "experts": [mlp.op_experts],
        "combine_a": [mlp.op_combine_a],
        "shared_experts": [mlp.op_shared_experts] if hasattr(mlp, "op_shared_experts") else [],
        "combine_b": [mlp.op_combine_b],
        "output": [mlp.op_output, layer.op_comm_postprocess_layer],
    }
    return prefill_order(steps)


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


def note_prefill(batch: Any) -> None:
    """How a prefill was cut, in the log: inside a prompt, or with nothing in one half."""
    halves = batch.tbo_children
    if not halves or not batch.forward_mode.is_extend_without_speculative():
        return
    if sum(half.batch_size for half in halves) > batch.batch_size:
        note("two-batch split inside a prompt")
    if not all(sum(half.extend_seq_lens_cpu) for half in halves):
        note("two-batch prefill with an empty half")


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
