"""Selection in torch: a product per chunk of rows, the k-th score as threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.indexer_v32 import choose, index_scores, positions_of
from sglang_ext.core.quant import FP8_BLOCK, dequantise_fp8

# Scores of one chunk before the heads are summed, in elements: 64 MiB of float32.
CHUNK_ELEMENTS = 1 << 24


def select_tokens_torch(
    q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """See `api.select_tokens`; arguments are taken as checked."""
    batch, rows, heads, _ = q.shape
    tokens = keys.shape[1]
    width = min(top_k, tokens)
    step = max(CHUNK_ELEMENTS // max(batch * heads * tokens, 1), 1)
    out = torch.empty(batch, rows, width, dtype=torch.int64, device=keys.device)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        seen = visible[:, part]
        if tokens <= top_k:
            column = torch.arange(tokens, device=keys.device)
            chosen = column < seen.unsqueeze(-1)
        else:
            chosen = choose(index_scores(q[:, part], weights[:, part], keys), seen, top_k)
        out[:, part] = positions_of(chosen.flatten(0, 1), width).view(batch, -1, width)
    return out


def select_tokens_fp8_torch(
    q: tuple[Tensor, Tensor],
    weights: Tensor,
    keys: tuple[Tensor, Tensor],
    visible: Tensor,
    top_k: int,
) -> Tensor:
    """See `api.select_tokens_fp8`; bytes, taken as checked."""
    return select_tokens_torch(_decoded(*q), weights, _decoded(*keys), visible, top_k)


def _decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """[..., dim] float32."""
    block = (1, min(FP8_BLOCK, codes.shape[-1]))
    wide = dequantise_fp8(codes.flatten(0, -2), scale.flatten(0, -2), block=block)
    return wide.view(codes.shape)
