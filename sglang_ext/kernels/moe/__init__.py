"""Mixture-of-experts feed-forward: routed rows in, their weighted sum out."""

from sglang_ext.kernels.moe.activation import Activation
from sglang_ext.kernels.moe.api import first_linear, routed_experts
from sglang_ext.kernels.moe.experts import ExpertWeights, Routing
from sglang_ext.kernels.moe.torch_grouped import second_linear

__all__ = [
    "Activation",
    "ExpertWeights",
    "Routing",
    "first_linear",
    "routed_experts",
    "second_linear",
]
