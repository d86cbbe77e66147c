"""Native Sparse Attention in Triton: one program per query row and key head.

The query heads that share a key head are the rows of the tile, so every key is loaded once for
all of them; that is what the selection by key head is for. Four kernels:
    _compressed   the gated compression branch, and its log-sum-exp
    _importance   the same probabilities again, added up per block
    _selected     the gated selection branch, added
    _window       the gated window branch, added
Before `_selected`, `kernels.top_k` picks the best blocks.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.core.nsa import NsaKeys, NsaSpec, ranked_blocks, visible_entries
from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.online_softmax import softmax_step
from sglang_ext.kernels.top_k.triton import best_entries_triton

_BLOCK_KEYS = 32
_MIN_ROWS = 16


@triton.jit
def _load_rows(base, head, rows, dim, HEADS: tl.constexpr, DIM: tl.constexpr):
    """[HEADS, DIM] tile of a row's heads, zero outside."""
    d = tl.arange(0, DIM)
    inside = (rows[:, None] >= 0) & (d < dim)[None, :]
    return tl.load(base + (head + rows)[:, None] * dim + d[None, :], inside, 0.0)


@triton.jit
def _tile(base, index, visible, g, key_heads, dim, KEYS_LAST: tl.constexpr, DIM: tl.constexpr):
    """Keys `index` of head g as [DIM, K], or values as [K, DIM]."""
    d = tl.arange(0, DIM)
    start = (index.to(tl.int64) * key_heads + g) * dim
    if KEYS_LAST:
        tile = tl.load(
            base + start[None, :] + d[:, None], visible[None, :] & (d < dim)[:, None], 0.0
        )
    else:
        tile = tl.load(
            base + start[:, None] + d[None, :], visible[:, None] & (d < dim)[None, :], 0.0
        )
    return tile


@triton.jit
def _compressed(
    q,  # [rows, key heads * share, dim]
    k_entry,  # [entries, key heads, dim]
    v_entry,  # [entries, key heads, value dim]
    counts,  # [rows] int, visible entries
    gates,  # [rows, key heads * share, 3]
    sums,  # [rows, key heads * share, value dim] float32
    lse,  # [rows, key heads * share] float32
    key_heads,
    share,
    dim,
    value_dim,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    h = tl.arange(0, HEADS)
    head = row * key_heads * share + g * share
    query = _load_rows(q, head, tl.where(h < share, h, -1), dim, HEADS, DIM)
    total = tl.zeros((HEADS, VALUE_DIM), dtype=tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS,), dtype=tl.float32)
    count = tl.load(counts + row).to(tl.int32)
    for start in range(0, count, KEYS):
        index = start + tl.arange(0, KEYS)
        visible = index < count
        k = _tile(k_entry, index, visible, g, key_heads, dim, True, DIM)
        v = _tile(v_entry, index, visible, g, key_heads, value_dim, False, VALUE_DIM)
        total, top, norm = softmax_step(query, k, v, visible, scale, total, top, norm)
    empty = norm == 0.0
    gate = tl.load(gates + (head + h) * 3, h < share, 0.0).to(tl.float32)
    total = total * (gate / tl.where(empty, 1.0, norm))[:, None]
    d = tl.arange(0, VALUE_DIM)
    inside = (h < share)[:, None] & (d < value_dim)[None, :]
    tl.store(sums + (head + h)[:, None] * value_dim + d[None, :], total, inside)
    logsum = tl.where(empty, 0.0, top + tl.log(tl.where(empty, 1.0, norm)))
    tl.store(lse + head + h, logsum, h < share)


@triton.jit
def _importance(
    q,
    k_entry,
    counts,
    lse,
    out,  # [rows, key heads, blocks] float32
    key_heads,
    share,
    dim,
    blocks,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PER_ENTRY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    h = tl.arange(0, HEADS)
    head = row * key_heads * share + g * share
    query = _load_rows(q, head, tl.where(h < share, h, -1), dim, HEADS, DIM)
    # Padded heads score 0 everywhere; +inf makes their probabilities 0.
    logsum = tl.load(lse + head + h, h < share, float("inf"))
    count = tl.load(counts + row).to(tl.int32)
    block = tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    total = tl.zeros((BLOCKS,), dtype=tl.float32)
    # Entry `block * PER_BLOCK + offset` shares `strides` of its strides with the block.
    for offset in range(1 - PER_ENTRY, PER_BLOCK):
        strides = tl.minimum(offset + PER_ENTRY, PER_BLOCK) - tl.maximum(offset, 0)
        index = block * PER_BLOCK + offset
        visible = (index >= 0) & (index < count)
        k = _tile(k_entry, index, visible, g, key_heads, dim, True, DIM)
        scores = tl.dot(query, k, input_precision="ieee") * scale - logsum[:, None]
        p = tl.where(visible[None, :], tl.exp(scores), 0.0)
        total += tl.sum(p, axis=0) * strides.to(tl.float32)
    tl.store(out + (row * key_heads + g) * blocks + block, total, block < blocks)


@triton.jit
def _selected(
    q,
    k_block,  # [tokens, key heads, dim]
    v_block,  # [tokens, key heads, value dim]
    gates,  # [rows, key heads * share, 3]
    chosen,  # [rows, key heads, COUNT] int64, -1 for none
    positions,  # [rows] int
    sums,  # [rows, key heads * share, value dim] float32, added to
    key_heads,
    share,
    dim,
    value_dim,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, VALUE_DIM)
    head = row * key_heads * share + g * share
    query = _load_rows(q, head, tl.where(h < share, h, -1), dim, HEADS, DIM)
    position = tl.load(positions + row).to(tl.int32)
    total = tl.zeros((HEADS, VALUE_DIM), dtype=tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS,), dtype=tl.float32)
    for choice in range(COUNT):
        block = tl.load(chosen + (row * key_heads + g) * COUNT + choice).to(tl.int32)
        stop = tl.where(block < 0, 0, tl.minimum((block + 1) * BLOCK, position + 1))
        for start in range(tl.maximum(block, 0) * BLOCK, stop, KEYS):
            index = start + tl.arange(0, KEYS)
            visible = index < stop
            k = _tile(k_block, index, visible, g, key_heads, dim, True, DIM)
            v = _tile(v_block, index, visible, g, key_heads, value_dim, False, VALUE_DIM)
            total, top, norm = softmax_step(query, k, v, visible, scale, total, top, norm)
    gate = tl.load(gates + (head + h) * 3 + 1, h < share, 0.0).to(tl.float32)
    inside = (h < share)[:, None] & (d < value_dim)[None, :]
    at = (head + h)[:, None] * value_dim + d[None, :]
    before = tl.load(sums + at, inside, 0.0)
    # At least the block of the query's own position is selected, unless count leaves it out.
    share_of = gate / tl.where(norm == 0.0, 1.0, norm)
    tl.store(sums + at, before + total * share_of[:, None], inside)


@triton.jit
def _window(
    q,
    k_window,
    v_window,
    gates,
    positions,
    sums,
    out,  # [rows, key heads * share, value dim]
    key_heads,
    share,
    dim,
    value_dim,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, VALUE_DIM)
    head = row * key_heads * share + g * share
    query = _load_rows(q, head, tl.where(h < share, h, -1), dim, HEADS, DIM)
    position = tl.load(positions + row).to(tl.int32)
    total = tl.zeros((HEADS, VALUE_DIM), dtype=tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS,), dtype=tl.float32)
    for start in range(tl.maximum(position + 1 - WINDOW, 0), position + 1, KEYS):
        index = start + tl.arange(0, KEYS)
        visible = index <= position
        k = _tile(k_window, index, visible, g, key_heads, dim, True, DIM)
        v = _tile(v_window, index, visible, g, key_heads, value_dim, False, VALUE_DIM)
        total, top, norm = softmax_step(query, k, v, visible, scale, total, top, norm)
    gate = tl.load(gates + (head + h) * 3 + 2, h < share, 0.0).to(tl.float32)
    inside = (h < share)[:, None] & (d < value_dim)[None, :]
    at = (head + h)[:, None] * value_dim + d[None, :]
    before = tl.load(sums + at, inside, 0.0)
    result = before + total * (gate / norm)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


def native_sparse_attention_triton(
    q: Tensor, keys: NsaKeys, gates: Tensor, positions: Tensor, spec: NsaSpec, scale: float
) -> Tensor:
    """See `api.native_sparse_attention`; contiguous arguments."""
    rows, heads, dim = q.shape
    key_heads, value_dim = keys.v_block.shape[1:]
    share, blocks = heads // key_heads, spec.blocks(keys.k_block.shape[0])
    sizes = {"HEADS": max(_MIN_ROWS, next_power_of_2(share)), "DIM": max(16, next_power_of_2(dim))}
    values = {"VALUE_DIM": max(16, next_power_of_2(value_dim)), "KEYS": _BLOCK_KEYS}
    counts = visible_entries(positions, spec).to(torch.int32)
    sums = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    widths = (key_heads, share, dim, value_dim, scale)
    launch(
        _compressed, (rows, key_heads),
        q, keys.k_entry, keys.v_entry, counts, gates, sums, lse, *widths,
        **sizes, **values,
    )  # fmt: skip
    importance = torch.empty(rows, key_heads, blocks, dtype=torch.float32, device=q.device)
    launch(
        _importance, (rows, key_heads, cdiv(blocks, _BLOCK_KEYS)),
        q, keys.k_entry, counts, lse, importance, key_heads, share, dim, blocks, scale,
        **sizes, BLOCKS=_BLOCK_KEYS, PER_BLOCK=spec.block // spec.stride,
        PER_ENTRY=spec.length // spec.stride,
    )  # fmt: skip
    chosen = _chosen_blocks(importance, positions, spec)
    launch(
        _selected, (rows, key_heads),
        q, keys.k_block, keys.v_block, gates, chosen, positions, sums, *widths,
        **sizes, **values, BLOCK=spec.block, COUNT=spec.count,
    )  # fmt: skip
    out = q.new_empty(rows, heads, value_dim)
    launch(
        _window, (rows, key_heads),
        q, keys.k_window, keys.v_window, gates, positions, sums, out, *widths,
        **sizes, **values, WINDOW=spec.window,
    )  # fmt: skip
    return out


def _chosen_blocks(importance: Tensor, positions: Tensor, spec: NsaSpec) -> Tensor:
    """As `core.nsa.select_blocks`; [rows, key heads, blocks] -> [rows, key heads, count]."""
    rows, key_heads, blocks = importance.shape
    ranked, visible = ranked_blocks(importance, positions, spec)
    chosen = best_entries_triton(
        ranked.view(1, rows * key_heads, blocks),
        torch.arange(blocks, device=importance.device).unsqueeze(0),
        visible.long().repeat_interleave(key_heads).unsqueeze(0),
        spec.count,
    )
    chosen = F.pad(chosen, (0, spec.count - chosen.shape[-1]), value=-1)
    return chosen.view(rows, key_heads, spec.count)
