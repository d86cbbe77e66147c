"""Feed-forward parts of DeepSeek-V3.2: a dense MLP in the first layers, experts after.

The choice is SGLang's grouped top-k, and the experts run in SGLang's MoE layer, so that expert
parallelism and rebalancing apply as to any other model.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import RoutingMethodType, filter_moe_weight_param_global_expert
from sglang.srt.runtime_context import get_exec
from torch import Tensor, nn

from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config
from sglang_ext.srt.parallel.overlapped_experts import OverlappedExperts


class DenseMLP(nn.Module):
    """SwiGLU feed-forward; a partial sum over the ranks of `group`."""

    def __init__(self, hidden: int, intermediate: int, prefix: str, group: str = "tp") -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [intermediate] * 2,
            bias=False,
            parallel_group=group,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate,
            hidden,
            bias=False,
            reduce_results=False,
            parallel_group=group,
            prefix=f"{prefix}.down_proj",
        )
        self.act = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act(gate_up))
        return out


class MoE(nn.Module):
    """Routed experts by grouped sigmoid top-k, plus the shared ones.

    The router is in float32. Its weights leave `TopK` complete: normalised and scaled.
    """

    def __init__(self, config: DeepseekV32Config, layer_id: int, prefix: str) -> None:
        super().__init__()
        experts = config.n_routed_experts
        self.gate = ReplicatedLinear(
            config.hidden_size,
            experts,
            bias=False,
            params_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        bias = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)
        self.gate.e_score_correction_bias = bias
        self.topk = TopK(
            config.num_experts_per_tok,
            layer_id=layer_id,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            renormalize=config.norm_topk_prob,
            scoring_func="sigmoid",
            correction_bias=bias,
            routed_scaling_factor=config.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=True,
        )
        self.experts: Any = get_moe_impl_class(None)(
            num_experts=experts + get_exec().moe.ep_num_redundant_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            layer_id=layer_id,
            prefix=f"{prefix}.experts",
            # The shared experts read the input afterwards.
            inplace=False,
            routing_method_type=RoutingMethodType.DeepSeekV3,
        )
        self.topk.bind_runner_backend(
            self.experts.runner_backend, routing_method_type=self.experts.routing_method_type
        )
        # An all-to-all brings every row's whole sum back, so the shared part must be whole too.
        whole = not get_moe_a2a_backend().is_none()
        self.shared_experts = DenseMLP(
            config.hidden_size,
            config.moe_intermediate_size * config.n_shared_experts,
            f"{prefix}.shared_experts",
            "replicated" if whole else "tp",
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, hidden], summed over ranks by the layer's boundary."""
        choice = self.choice(x)
        if isinstance(self.experts, OverlappedExperts):
            return self.experts.with_shared(x, choice, self.shared_experts)
        routed = self.experts(x, choice)
        return routed + self.shared_experts(x) if x.shape[0] else routed

    def choice(self, x: Tensor) -> Any:
        """SGLang's record of the experts that x [rows, hidden] goes to."""
        if not x.shape[0]:
            return self.topk.empty_topk_output(x.device)
        logits, _ = self.gate(x.float())
        return self.topk(x, logits)

    def routed_weights(self) -> list[Tensor]:
        """[local experts, ...] tensors that move when experts are rebalanced."""
        return [
            p.data
            for name, p in self.experts.named_parameters()
            if filter_moe_weight_param_global_expert(name, p, self.experts.num_local_experts)
        ]
