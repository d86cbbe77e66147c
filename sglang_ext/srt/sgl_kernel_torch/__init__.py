"""`sgl_kernel` in torch, for machines where SGLang's CUDA library cannot be loaded."""

from __future__ import annotations

from sglang_ext.srt.sgl_kernel_torch.install import Report, install

__all__ = ["Report", "install"]
