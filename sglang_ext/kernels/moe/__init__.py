"""Mixture-of-experts feed-forward: routed rows in, their weighted sum out."""

from sglang_ext.kernels.moe.activation import Activation
from sglang_ext.kernels.moe.api import routed_experts
from sglang_ext.kernels.moe.experts import ExpertWeights, Routing

__all__ = ["Activation", "ExpertWeights", "Routing", "routed_experts"]
