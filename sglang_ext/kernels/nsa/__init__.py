"""Native Sparse Attention over one sequence."""

from sglang_ext.core.nsa import NsaKeys, NsaSpec
from sglang_ext.kernels.nsa.api import native_sparse_attention

__all__ = ["NsaKeys", "NsaSpec", "native_sparse_attention"]
