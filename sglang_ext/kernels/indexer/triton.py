"""The indexer's scores in Triton; the choice among them stays in torch, on the device.

One program scores a tile of entries for a few query rows of the same request, so a key is loaded
once for all of them. Heads are summed in registers: the scores of single heads never exist in
memory.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.ordered import select_best

_ROWS = 8
_ENTRIES = 32


@triton.jit
def _index_scores(
    q,  # [batch, rows, heads, dim]
    weights,  # [batch, rows, heads] float32
    pool,  # [pool rows, dim]
    slots,  # [batch, entries] int64
    visible,  # [batch, rows] int64
    out,  # [batch, rows, entries] float32, written where visible
    rows,
    heads,
    dim,
    entries,
    scale,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    start = tl.program_id(2) * ENTRIES
    entry = start + tl.arange(0, ENTRIES)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    slot = tl.load(slots + b * entries + entry, entry < entries, 0)
    inside = (entry < entries)[None, :] & (d < dim)[:, None]
    keys = tl.load(pool + slot.to(tl.int64)[None, :] * dim + d[:, None], inside, 0.0)
    keys = keys.to(q.dtype.element_ty)
    first = tl.program_id(1) * ROWS
    for n in range(first, tl.minimum(first + ROWS, rows)):
        row = b * rows + n
        seen = tl.load(visible + row)
        if start < seen:
            head = (row * heads + h)[:, None]
            live = (h < heads)[:, None] & (d < dim)[None, :]
            query = tl.load(q + head * dim + d[None, :], live, 0.0)
            weight = tl.load(weights + row * heads + h, h < heads, 0.0)
            products = tl.maximum(tl.dot(query, keys, input_precision="ieee") * scale, 0.0)
            score = tl.sum(products * weight[:, None], axis=0)
            tl.store(out + row * entries + entry, score, entry < seen)


def index_scores_triton(
    q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor, visible: Tensor
) -> Tensor:
    """Scores as `api.select_entries` defines them, [batch, rows, entries] float32.

    Entries that a row does not see hold whatever was in memory.
    """
    batch, rows, heads, dim = q.shape
    entries = slots.shape[1]
    out = torch.empty(batch, rows, entries, dtype=torch.float32, device=q.device)
    launch(
        _index_scores, (batch, cdiv(rows, _ROWS), cdiv(entries, _ENTRIES)),
        q.to(torch.promote_types(q.dtype, pool.dtype)), weights, pool, slots, visible, out,
        rows, heads, dim, entries, dim**-0.5,
        ROWS=_ROWS, HEADS=max(16, next_power_of_2(heads)), DIM=max(16, next_power_of_2(dim)),
        ENTRIES=_ENTRIES,
    )  # fmt: skip
    return out


def select_entries_triton(
    q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """See `api.select_entries`; contiguous arguments."""

    def scores(part: slice, seen: Tensor) -> Tensor:
        tiles = (q[:, part].contiguous(), weights[:, part].contiguous())
        return index_scores_triton(*tiles, pool, slots, seen)

    return select_best(scores, slots, visible, top_k)
