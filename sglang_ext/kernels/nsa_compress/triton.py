"""Native Sparse Attention's compression in Triton: a product over the tokens of each entry.

Blocks overlap, so rows are read where they lie instead of being copied per entry.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.nsa import NsaSpec
from sglang_ext.kernels.launch import cdiv, launch

_ENTRIES = 16


@triton.jit
def _entries(
    x,  # [tokens, heads, dim]
    position,  # [length, heads, dim]
    weight,  # [heads, length, dim, out dim]
    out,  # [entries, heads, out dim]
    entries,
    heads,
    dim,
    out_dim,
    stride,
    length,
    ENTRIES: tl.constexpr,
    DIM: tl.constexpr,
    OUT: tl.constexpr,
):
    e = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    g = tl.program_id(1)
    o = tl.program_id(2) * OUT + tl.arange(0, OUT)
    total = tl.zeros((ENTRIES, OUT), dtype=tl.float32)
    for i in range(length):
        row = ((e * stride + i) * heads + g) * dim
        place = (i * heads + g) * dim
        matrix = (g * length + i).to(tl.int64) * dim * out_dim
        for start in range(0, dim, DIM):
            d = start + tl.arange(0, DIM)
            inside = (e < entries)[:, None] & (d < dim)[None, :]
            tile = tl.load(x + row[:, None] + d[None, :], inside, 0.0)
            tile += tl.load(position + place + d, d < dim, 0.0)[None, :]
            at = matrix + d[:, None] * out_dim + o[None, :]
            w = tl.load(weight + at, (d < dim)[:, None] & (o < out_dim)[None, :], 0.0)
            total += tl.dot(tile, w, input_precision="ieee")
    at = (e * heads + g)[:, None] * out_dim + o[None, :]
    inside = (e < entries)[:, None] & (o < out_dim)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


def compress_entries_triton(x: Tensor, position: Tensor, weight: Tensor, spec: NsaSpec) -> Tensor:
    """See `api.compress_entries`; contiguous arguments."""
    tokens, heads, dim = x.shape
    entries, out_dim = spec.entries(tokens), weight.shape[3]
    out = torch.empty(entries, heads, out_dim, dtype=x.dtype, device=x.device)
    tile_d, tile_o = (16, 32) if x.dtype == torch.float32 else (64, 64)
    launch(
        _entries, (cdiv(entries, _ENTRIES), heads, cdiv(out_dim, tile_o)),
        x, position, weight, out, entries, heads, dim, out_dim, spec.stride, spec.length,
        ENTRIES=_ENTRIES, DIM=tile_d, OUT=tile_o,
    )  # fmt: skip
    return out
