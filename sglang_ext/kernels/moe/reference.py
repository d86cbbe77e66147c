"""Mixture of experts as a loop over rows and choices, in float32."""

from __future__ import annotations

import torch

from sglang_ext.kernels.moe.activation import Activation
from sglang_ext.kernels.moe.experts import ExpertWeights, Routing


def routed_experts_reference(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, activation: Activation
) -> torch.Tensor:
    """out[row] = sum over the row's choices of weight * w2 act(w13 x[row]); x [rows, hidden]."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(x.shape[0]):
        for choice, expert in enumerate(routing.ids[row].tolist()):
            if expert < 0:
                continue
            weight = float(routing.weights[row, choice])
            inner = x[row].float() * (weight if routing.weigh_input else 1.0)
            inner = experts.w13[expert].float() @ inner
            if experts.w13_bias is not None:
                inner = inner + experts.w13_bias[expert].float()
            inner = experts.w2[expert].float() @ activation(inner.unsqueeze(0)).squeeze(0)
            if experts.w2_bias is not None:
                inner = inner + experts.w2_bias[expert].float()
            out[row] += inner * (1.0 if routing.weigh_input else weight)
    return out
