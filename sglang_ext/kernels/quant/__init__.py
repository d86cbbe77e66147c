"""Quantised storage: activations in, weights out. Formats are in `core.quant`."""

from sglang_ext.kernels.quant.api import act_quant, dequantise_fp4, dequantise_fp8

__all__ = ["act_quant", "dequantise_fp4", "dequantise_fp8"]
