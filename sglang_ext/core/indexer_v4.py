"""The lightning indexer of DeepSeek-V4's CSA layers: which compressed entries a query reads.

    q_h   = rotate(wq_b c_q)                       one vector per index head
    k_i   = entry i of the indexer's own compressor
    w_h   = (weights_proj x)_h * heads^-1/2        in float32
    score = sum_h w_h * ReLU(q_h . k_i * dim^-1/2)
The rotation covers the LAST dimensions, neighbours as pairs; DeepSeek-V3.2 rotates the first ones
half-split, so only what follows the rotation is shared with it. The published kernels turn q and
k by a Hadamard matrix and round them to fp8 or fp4; here neither is done, which is exact.

Equal scores: the earliest entry wins, on every device and for every number of entries. ReLU makes
scores of exactly zero common, and torch.topk promises no order among equals.

Source: DeepSeek-V4 report, lightning indexer.
"""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core.indexer_v32 import choose, head_weights, index_scores, positions_of
from sglang_ext.core.rope import rotate_trailing_pairs

__all__ = ["choose", "head_weights", "index_query", "index_scores", "positions_of"]


def index_query(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, dim] projections -> index queries; cos, sin [tokens, rope / 2]."""
    return rotate_trailing_pairs(q, cos, sin)
