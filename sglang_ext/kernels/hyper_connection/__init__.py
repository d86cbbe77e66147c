"""Hyper-connections: the mix of residual streams before and after a sublayer."""

from sglang_ext.core.hyper_connection import HcMix
from sglang_ext.kernels.hyper_connection.api import hc_head, hc_post, hc_pre

__all__ = ["HcMix", "hc_head", "hc_post", "hc_pre"]
