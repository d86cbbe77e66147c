"""Top-k selection of DeepSeek-V3.2's indexer over cached index keys."""

from sglang_ext.kernels.indexer_v32.api import select_tokens

__all__ = ["select_tokens"]
