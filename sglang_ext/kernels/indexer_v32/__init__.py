"""Top-k selection of DeepSeek-V3.2's indexer over cached index keys."""

from sglang_ext.kernels.indexer_v32.api import select_tokens, select_tokens_fp8

__all__ = ["select_tokens", "select_tokens_fp8"]
