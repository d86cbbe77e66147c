"""Top-k selection of DeepSeek-V4's indexer over compressed index keys."""

from sglang_ext.kernels.indexer.api import select_entries

__all__ = ["select_entries"]
