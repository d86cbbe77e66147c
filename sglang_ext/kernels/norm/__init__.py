"""Root-mean-square normalisation."""

from sglang_ext.kernels.norm.api import RmsNorm, rms_norm

__all__ = ["RmsNorm", "rms_norm"]
