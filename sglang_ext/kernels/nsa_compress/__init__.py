"""Native Sparse Attention's entries from the keys or values of tokens."""

from sglang_ext.core.nsa import NsaSpec
from sglang_ext.kernels.nsa_compress.api import compress_entries

__all__ = ["NsaSpec", "compress_entries"]
