"""Attention over chosen rows of one or two pools, keys and values one latent, with a sink."""

from sglang_ext.kernels.sparse_attention.api import Rows, sparse_attention

__all__ = ["Rows", "sparse_attention"]
