"""The best entries in Triton: the k-th score digit by digit, then one pass that keeps order.

One program per row. Floats become integers in the same order; four passes over a row count its
digits of 8 bits, from the highest on, and fix one digit of the k-th largest score each.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.kernels.launch import launch

_TILE = 1024


@triton.jit
def _ordered(x):
    """float32 -> int64 from 0 to 2^32 - 1 in the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return signed.to(tl.int64) + 2147483648


@triton.jit
def _best_entries(
    scores,  # [batch * rows, entries] float32
    values,  # [batch, entries] int64
    visible,  # [batch * rows] int64
    out,  # [batch * rows, width] int64
    rows,
    entries,
    width,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * entries
    seen = tl.minimum(tl.load(visible + row), entries).to(tl.int32)
    i = tl.arange(0, TILE)
    digit = tl.arange(0, 256)
    prefix = row * 0
    # Entries still to be found among those whose key begins with the prefix.
    needed = width
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        count = tl.zeros((256,), dtype=tl.int32)
        for start in range(0, seen, TILE):
            live = start + i < seen
            key = _ordered(tl.load(base + start + i, live, 0.0))
            live = live & ((key >> (shift + 8)) == prefix)
            count += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=live)
        at_least = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
        found = tl.max(tl.where(at_least >= needed, digit, 0), axis=0)
        needed = needed - tl.sum(tl.where(digit > found, count, 0), axis=0)
        prefix = prefix * 256 + found
    taken = seen * 0
    level = seen * 0
    for start in range(0, seen, TILE):
        live = start + i < seen
        key = _ordered(tl.load(base + start + i, live, 0.0))
        equal = (live & (key == prefix)).to(tl.int32)
        first = equal * (level + tl.cumsum(equal, axis=0))
        keep = live & ((key > prefix) | ((first > 0) & (first <= needed)))
        kept = keep.to(tl.int32)
        place = taken + tl.cumsum(kept, axis=0) - 1
        value = tl.load(values + (row // rows) * entries + start + i, live, 0)
        tl.store(out + row * width + place, value, keep)
        taken += tl.sum(kept, axis=0)
        level += tl.sum(equal, axis=0)
    for start in range(taken, width, TILE):
        none = tl.full((TILE,), -1, tl.int64)
        tl.store(out + row * width + start + i, none, start + i < width)


def best_entries_triton(scores: Tensor, values: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """See `api.best_entries`; contiguous arguments."""
    batch, rows, entries = scores.shape
    width = min(top_k, entries)
    out = torch.empty(batch, rows, width, dtype=torch.int64, device=scores.device)
    launch(
        _best_entries, (batch * rows if width else 0,),
        scores, values, visible, out, rows, entries, width, TILE=_TILE,
    )  # fmt: skip
    return out
