"""Native Sparse Attention in Triton: one program per query row and key head.

The query heads that share a key head are the rows of the tile, so every key is loaded once for
all of them; that is what the selection by key head is for. Three kernels:
    _compressed   the compression branch, its output and log-sum-exp
    _importance   the same probabilities again, added up per block
    _fine         selection and window branches, gated and added to the compression branch
Between the last two the best blocks are sorted out by `core.nsa.select_blocks` on the device.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.nsa import NsaKeys, NsaSpec, select_blocks, visible_entries
from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.online_softmax import softmax_step

_BLOCK_KEYS = 32
# Exact float32 products hold their operands in registers.
_FLOAT32_BLOCK_KEYS = 16
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
    out,  # [rows, key heads * share, value dim] float32
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
    total = total / tl.where(empty, 1.0, norm)[:, None]
    d = tl.arange(0, VALUE_DIM)
    inside = (h < share)[:, None] & (d < value_dim)[None, :]
    tl.store(out + (head + h)[:, None] * value_dim + d[None, :], total, inside)
    # +inf makes every probability of a query without entries 0.
    logsum = tl.where(empty, float("inf"), top + tl.log(tl.where(empty, 1.0, norm)))
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
def _fine(
    q,
    k_block,  # [tokens, key heads, dim]
    v_block,
    k_window,
    v_window,
    compressed,  # [rows, key heads * share, value dim] float32
    gates,  # [rows, key heads * share, 3]
    chosen,  # [rows, key heads, COUNT] int64, -1 for none
    positions,  # [rows] int
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
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
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
    for choice in range(COUNT):
        block = tl.load(chosen + (row * key_heads + g) * COUNT + choice).to(tl.int32)
        stop = tl.where(block < 0, 0, tl.minimum((block + 1) * BLOCK, position + 1))
        for start in range(tl.maximum(block, 0) * BLOCK, stop, KEYS):
            index = start + tl.arange(0, KEYS)
            visible = index < stop
            k = _tile(k_block, index, visible, g, key_heads, dim, True, DIM)
            v = _tile(v_block, index, visible, g, key_heads, value_dim, False, VALUE_DIM)
            total, top, norm = softmax_step(query, k, v, visible, scale, total, top, norm)
    gate = gates + (head + h) * 3
    result = total * (tl.load(gate + 1, h < share, 0.0).to(tl.float32) / norm)[:, None]
    total = tl.zeros((HEADS, VALUE_DIM), dtype=tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS,), dtype=tl.float32)
    for start in range(tl.maximum(position + 1 - WINDOW, 0), position + 1, KEYS):
        index = start + tl.arange(0, KEYS)
        visible = index <= position
        k = _tile(k_window, index, visible, g, key_heads, dim, True, DIM)
        v = _tile(v_window, index, visible, g, key_heads, value_dim, False, VALUE_DIM)
        total, top, norm = softmax_step(query, k, v, visible, scale, total, top, norm)
    result += total * (tl.load(gate + 2, h < share, 0.0).to(tl.float32) / norm)[:, None]
    inside = (h < share)[:, None] & (d < value_dim)[None, :]
    at = (head + h)[:, None] * value_dim + d[None, :]
    coarse = tl.load(compressed + at, inside, 0.0)
    result += coarse * tl.load(gate, h < share, 0.0).to(tl.float32)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


def native_sparse_attention_triton(
    q: Tensor, keys: NsaKeys, gates: Tensor, positions: Tensor, spec: NsaSpec, scale: float
) -> Tensor:
    """See `api.native_sparse_attention`; contiguous arguments."""
    rows, heads, dim = q.shape
    key_heads, value_dim = keys.v_block.shape[1:]
    share, blocks = heads // key_heads, spec.blocks(keys.k_block.shape[0])
    sizes = {"HEADS": max(_MIN_ROWS, next_power_of_2(share)), "DIM": max(16, next_power_of_2(dim))}
    tile = _FLOAT32_BLOCK_KEYS if q.dtype == torch.float32 else _BLOCK_KEYS
    values = {"VALUE_DIM": max(16, next_power_of_2(value_dim)), "KEYS": tile}
    counts = visible_entries(positions, spec).to(torch.int32)
    compressed = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    launch(
        _compressed, (rows, key_heads),
        q, keys.k_entry, keys.v_entry, counts, compressed, lse,
        key_heads, share, dim, value_dim, scale,
        **sizes, **values,
    )  # fmt: skip
    importance = torch.empty(rows, key_heads, blocks, dtype=torch.float32, device=q.device)
    launch(
        _importance, (rows, key_heads, cdiv(blocks, tile)),
        q, keys.k_entry, counts, lse, importance, key_heads, share, dim, blocks, scale,
        **sizes, BLOCKS=tile, PER_BLOCK=spec.block // spec.stride,
        PER_ENTRY=spec.length // spec.stride,
    )  # fmt: skip
    chosen = select_blocks(importance, positions, spec)
    out = q.new_empty(rows, heads, value_dim)
    launch(
        _fine, (rows, key_heads),
        q, keys.k_block, keys.v_block, keys.k_window, keys.v_window,
        compressed, gates, chosen, positions, out, key_heads, share, dim, value_dim, scale,
        **sizes, **values, BLOCK=spec.block, COUNT=spec.count, WINDOW=spec.window,
    )  # fmt: skip
    return out
