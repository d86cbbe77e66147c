"""SGLang's plain-torch MoE call, answered by `kernels.moe`.

SGLang:  moe_forward_native(layer, x, topk_output, moe_runner_config) -> Tensor
kernels: routed_experts(x, experts, routing, activation) -> Tensor

The layer's weights and the runner's loose options become the three records the kernel takes.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.kernels.moe import Activation, ExpertWeights, Routing, routed_experts


def activation_of(config: Any) -> Activation:
    """The activation that a `MoeRunnerConfig` describes.

    Raises:
        ValueError: a form that is not known, naming the options.
    """
    gpt_oss = config.activation == "silu" and config.is_gated and config.gemm1_alpha is not None
    return Activation(
        kind=config.activation,
        gated=config.is_gated,
        alpha=config.gemm1_alpha,
        limit=config.gemm1_clamp_limit,
        clamp=config.swiglu_limit,
        interleaved=gpt_oss and config.gate_up_interleaved,
    )


def weights_of(layer: Any) -> ExpertWeights:
    """The weights of a layer of this rank's experts, and their `_bias` where it has them."""
    return ExpertWeights(
        layer.w13_weight,
        layer.w2_weight,
        getattr(layer, "w13_weight_bias", None),
        getattr(layer, "w2_weight_bias", None),
    )


def moe_forward(
    layer: Any,
    x: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
) -> torch.Tensor:
    """Runs the experts of one layer on this rank's rows.

    Args:
        layer: holds w13_weight, w2_weight and, where the model has them, their `_bias`.
        x: [rows, hidden].
        topk_output: SGLang's standard top-k output; ids are local, -1 for another rank's expert.
        moe_runner_config: SGLang's `MoeRunnerConfig`.

    Returns:
        [rows, hidden]; the routed scaling factor is left to the model, as in SGLang's version.
    """
    experts = weights_of(layer)
    routing = Routing(
        topk_output.topk_weights,
        topk_output.topk_ids,
        weigh_input=moe_runner_config.apply_router_weight_on_input,
    )
    return routed_experts(x, experts, routing, activation_of(moe_runner_config))
