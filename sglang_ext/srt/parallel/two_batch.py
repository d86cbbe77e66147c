"""Two-batch overlap without SM counts: the same operations in the same order, on any device.

SGLang's prefill strategies ask CUDA how many SMs its GEMMs may take while a dispatch runs. Nothing
of the schedule depends on that number. Off CUDA nothing runs side by side either, so the schedule
changes no speed: what it is good for there is to hold its results to those of one batch.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.batch_overlap.operations import YieldOperation
from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy

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
