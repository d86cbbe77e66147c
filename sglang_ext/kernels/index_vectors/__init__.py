"""Queries and keys of the lightning indexers, from their projections to what is scored."""

from sglang_ext.core.indexer_v32 import Precision
from sglang_ext.kernels.index_vectors.api import index_key, index_query, index_query_v4

__all__ = ["Precision", "index_key", "index_query", "index_query_v4"]
