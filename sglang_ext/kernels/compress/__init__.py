"""Softmax pooling of token rows into compressed entries (DeepSeek-V4)."""

from sglang_ext.kernels.compress.api import compress_blocks

__all__ = ["compress_blocks"]
