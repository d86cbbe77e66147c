"""The best entries of a list, in their own order."""

from sglang_ext.kernels.top_k.api import best_entries

__all__ = ["best_entries"]
