"""Sparse attention in Triton: one program per query and 16 heads.

Keys and values are the same rows, so a row is loaded once and used for both products. Rows wider
than their value (DeepSeek-V3.2: 576 and 512) are kept as two tiles, each padded on its own. The
sink starts the running softmax, as a key that was seen already and brought no value. Of pools in
bfloat16 the weights are rounded to bfloat16 before the second product; of float32 nothing is.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import reduce

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.online_softmax import load_columns, weigh
from sglang_ext.kernels.sparse_attention.rows import Rows

_HEADS = 16
# Keys of a tile, warps and pipeline stages. Exact float32 products hold operands in registers.
_TILE = (32, 4, 2)
_FLOAT32_TILE = (16, 8, 1)


@triton.jit
def _source(
    query, rest, pool, index, width, dim, value_dim, scale, total, top, norm,
    KEYS: tl.constexpr, VALUE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All rows that one source names, into the running sums. Not `online_softmax.softmax_step`:
    the product over a row has two parts here."""
    for start in range(0, width, KEYS):
        i = start + tl.arange(0, KEYS)
        row = tl.load(index + i, i < width, -1)
        live = row >= 0
        value = load_columns(pool, row, live, dim, 0, value_dim, VALUE).to(query.dtype)
        scores = tl.dot(query, tl.trans(value), input_precision="ieee")
        if REST > 0:
            tail = load_columns(pool, row, live, dim, value_dim, dim - value_dim, REST).to(
                query.dtype
            )
            scores += tl.dot(rest, tl.trans(tail), input_precision="ieee")
        p, total, top, norm = weigh(scores * scale, live[None, :], total, top, norm)
        total += tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return total, top, norm


@triton.jit
def _sparse_attention(
    q,  # [queries, heads, dim]
    pool_a,  # [pool rows, dim]
    index_a,  # [queries, width_a] int64, -1 for none
    pool_b,
    index_b,
    sink,  # [heads] float32
    out,  # [queries, heads, value_dim]
    heads,
    width_a,
    width_b,
    dim,
    value_dim,
    scale,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    SINK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = h < heads
    query = load_columns(q + n * heads * dim, h, live, dim, 0, value_dim, VALUE)
    # Without a rest this tile is never looked at.
    rest = query
    if REST > 0:
        rest = load_columns(q + n * heads * dim, h, live, dim, value_dim, dim - value_dim, REST)
    total = tl.zeros((HEADS, VALUE), dtype=tl.float32)
    if SINK:
        top = tl.load(sink + h, live, 0.0)
        norm = tl.full((HEADS,), 1.0, tl.float32)
    else:
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        norm = tl.zeros((HEADS,), dtype=tl.float32)
    total, top, norm = _source(
        query, rest, pool_a, index_a + n * width_a, width_a, dim, value_dim, scale,
        total, top, norm, KEYS, VALUE, REST,
    )  # fmt: skip
    total, top, norm = _source(
        query, rest, pool_b, index_b + n * width_b, width_b, dim, value_dim, scale,
        total, top, norm, KEYS, VALUE, REST,
    )  # fmt: skip
    # A query that names no row and has no sink gives 0.
    result = total / tl.where(norm == 0.0, 1.0, norm)[:, None]
    c = tl.arange(0, VALUE)
    inside = live[:, None] & (c < value_dim)[None, :]
    at = (n * heads + h)[:, None] * value_dim + c[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


def sparse_attention_triton(
    q: Tensor, sources: tuple[Rows, ...], sink: Tensor | None, scale: float, value_dim: int
) -> Tensor:
    """See `api.sparse_attention`; contiguous arguments, one or two sources."""
    queries, heads, dim = q.shape
    out = q.new_empty(queries, heads, value_dim)
    common = reduce(torch.promote_types, [s.pool.dtype for s in sources], q.dtype)
    first = sources[0]
    # One source: the second reads none of the first's rows.
    second, second_width = (sources[1], sources[1].index.shape[1]) if sources[1:] else (first, 0)
    keys, warps, stages = _FLOAT32_TILE if common == torch.float32 else _TILE
    rest = dim - value_dim
    launch(
        _sparse_attention, (queries, cdiv(heads, _HEADS)),
        q.to(common), first.pool, first.index, second.pool, second.index,
        # Without a sink the pointer is never read.
        q if sink is None else sink, out,
        heads, first.index.shape[1], second_width, dim, value_dim, scale,
        HEADS=_HEADS, KEYS=keys, VALUE=max(16, next_power_of_2(value_dim)),
        REST=max(16, next_power_of_2(rest)) if rest else 0, SINK=sink is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
