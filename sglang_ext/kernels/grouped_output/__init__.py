"""Inverse rotation of attention outputs and the grouped half of the output projection."""

from sglang_ext.kernels.grouped_output.api import grouped_output

__all__ = ["grouped_output"]
