"""Attention over a paged K/V pool: plan once per forward, call once per layer."""

from sglang_ext.kernels.attention.api import paged_attention
from sglang_ext.kernels.attention.masks import BandMasks
from sglang_ext.kernels.attention.plan import AttentionPlan, PlanCosts
from sglang_ext.kernels.attention.spec import AttentionSpec

__all__ = ["AttentionPlan", "AttentionSpec", "BandMasks", "PlanCosts", "paged_attention"]
