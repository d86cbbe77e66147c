"""The clamped gate between the two linears of a DeepSeek-V4 expert."""

from sglang_ext.kernels.swiglu.api import clamped_swiglu

__all__ = ["clamped_swiglu"]
