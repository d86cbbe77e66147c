"""Experts of DeepSeek-V4: chosen by a table of token ids in the first layers, by score after.

The choice is ours, the experts run in SGLang's MoE layer, so that expert parallelism and
rebalancing apply as to any other model.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.eplb.expert_location_dispatch import topk_ids_logical_to_physical
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.topk import StandardTopKOutput, resolve_routing_inputs
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.runtime_context import get_exec, get_flags
from torch import Tensor, nn

from sglang_ext.kernels.router import route_hash, route_sqrtsoftplus
from sglang_ext.kernels.swiglu import clamped_swiglu
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config
from sglang_ext.srt.parallel.context import real_rows
from sglang_ext.srt.parallel.expert_rows import ExpertRows
from sglang_ext.srt.parallel.overlapped_experts import OverlappedExperts


class Gate(nn.Module):
    """Which experts a token goes to, with complete weights: normalised and scaled. In fp32."""

    def __init__(self, config: DeepseekV4Config, layer_id: int, *, hashed: bool) -> None:
        super().__init__()
        experts = config.n_routed_experts
        self.layer_id, self.hashed = layer_id, hashed
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.is_draft = get_flags().moe.in_speculative_scope
        wide = torch.float32
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=wide))
        if hashed:
            table = torch.zeros(config.vocab_size, self.top_k, dtype=torch.int64)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.empty(experts, dtype=wide), requires_grad=False)

    def forward(self, x: Tensor, input_ids: Tensor, real: int | None) -> StandardTopKOutput:
        """x [rows, hidden], input_ids [rows] -> SGLang's record of the choice.

        real: rows that are not padding, the first ones; None for all. Padding chooses no expert.
        """
        logits = torch.nn.functional.linear(x.float(), self.weight)
        if self.hashed:
            chosen = route_hash(logits, input_ids, self.tid2eid, scaling=self.scaling)
        else:
            chosen = route_sqrtsoftplus(logits, self.bias, top_k=self.top_k, scaling=self.scaling)
        _, locations = resolve_routing_inputs(layer_id=self.layer_id, is_draft=self.is_draft)
        ids = topk_ids_logical_to_physical(chosen.ids.int(), locations)
        if real is not None:
            ids[real:] = -1
        # A draft's experts are not balanced, and its layers are not those that are counted.
        if not self.is_draft:
            get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids)
        return StandardTopKOutput(chosen.weights, ids, logits)


class SharedExpert(nn.Module):
    """The expert that every token goes to; a partial sum over the ranks of `group`."""

    def __init__(self, config: DeepseekV4Config, prefix: str, group: str) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w13 = MergedColumnParallelLinear(
            hidden, [width] * 2, bias=False, parallel_group=group, prefix=f"{prefix}.w13"
        )
        self.w2 = RowParallelLinear(
            width,
            hidden,
            bias=False,
            reduce_results=False,
            parallel_group=group,
            prefix=f"{prefix}.w2",
        )

    def forward(self, x: Tensor) -> Tensor:
        merged, _ = self.w13(x)
        gate, up = merged.chunk(2, dim=-1)
        y, _ = self.w2(clamped_swiglu(gate, up, self.limit))
        return y


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(
        self, config: DeepseekV4Config, layer_id: int, prefix: str, *, hashed: bool
    ) -> None:
        super().__init__()
        self.gate = Gate(config, layer_id, hashed=hashed)
        # A draft's experts are not rebalanced.
        copies = 0 if self.gate.is_draft else get_exec().moe.ep_num_redundant_experts
        self.experts: Any = get_moe_impl_class(None)(
            num_experts=config.n_routed_experts + copies,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            layer_id=layer_id,
            prefix=f"{prefix}.experts",
            swiglu_limit=config.swiglu_limit,
        )
        self.rows = ExpertRows()
        # An all-to-all brings every row's whole sum back, so the shared part must be whole too.
        self.shared_experts = SharedExpert(
            config, f"{prefix}.shared_experts", "replicated" if self.rows.exchanged else "tp"
        )

    def forward(self, x: Tensor, input_ids: Tensor, forward_batch: Any) -> Tensor:
        """x [rows, hidden] -> [rows, hidden], summed over the ranks."""
        there, choice = self.routed(x, input_ids, forward_batch)
        if isinstance(self.experts, OverlappedExperts):
            y = self.experts.with_shared(there, choice, self.shared_experts)
        else:
            # A copy, because the experts may overwrite their input.
            y = self.experts(there.clone(), choice) + self.shared_experts(there)
        return self.rows.back(y, x.shape[0], forward_batch)

    def routed(
        self, x: Tensor, input_ids: Tensor, forward_batch: Any
    ) -> tuple[Tensor, StandardTopKOutput]:
        """Rows where their experts, or the exchange, take them, with their choice."""
        choice = self.gate(x, input_ids, real_rows(forward_batch))
        return self.rows.there(x, choice, forward_batch)

    def routed_weights(self) -> list[Tensor]:
        """[local experts, ...] tensors that move when experts are rebalanced."""
        return [
            p.data
            for name, p in self.experts.named_parameters()
            if filter_moe_weight_param_global_expert(name, p, self.experts.num_local_experts)
        ]
