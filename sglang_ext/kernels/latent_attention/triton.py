"""Latent attention in Triton.

Absorbed queries: one program per query row and 16 heads; a latent is key and value, so it is loaded
once for both products, as two tiles where rows are wider than their value (576 and 512). Expanded
keys and values: one program per tile of rows and head, up to the diagonal. Of 16-bit keys the
weights are rounded to their dtype before the second product; of float32 nothing is.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.online_softmax import load_columns, weigh

_HEADS = 16
# Keys of a tile, warps and pipeline stages. Exact float32 products hold operands in registers.
_TILE = (32, 4, 2)
_FLOAT32_TILE = (16, 8, 1)
_ROWS = 32
_FLOAT32_ROWS = 16


@triton.jit
def _visible(
    q,  # [batch, rows, heads, dim]
    latents,  # [batch, tokens, dim]
    visible,  # [batch, rows] int64
    out,  # [batch, rows, heads, value_dim]
    rows,
    heads,
    tokens,
    dim,
    value_dim,
    scale,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
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
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS,), dtype=tl.float32)
    own = latents + (n // rows) * tokens * dim
    seen = tl.load(visible + n)
    for start in range(0, seen, KEYS):
        j = start + tl.arange(0, KEYS)
        value = load_columns(own, j, j < seen, dim, 0, value_dim, VALUE).to(query.dtype)
        scores = tl.dot(query, tl.trans(value), input_precision="ieee")
        if REST > 0:
            tail = load_columns(own, j, j < seen, dim, value_dim, dim - value_dim, REST).to(
                query.dtype
            )
            scores += tl.dot(rest, tl.trans(tail), input_precision="ieee")
        p, total, top, norm = weigh(scores * scale, (j < seen)[None, :], total, top, norm)
        total += tl.dot(p.to(value.dtype), value, input_precision="ieee")
    # A row that sees nothing gives 0.
    result = total / tl.where(norm == 0.0, 1.0, norm)[:, None]
    c = tl.arange(0, VALUE)
    at = (n * heads + h)[:, None] * value_dim + c[None, :]
    inside = live[:, None] & (c < value_dim)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


@triton.jit
def _expanded(
    q,  # [rows, heads, dim]
    keys,  # [first + rows, heads, dim]
    values,  # [first + rows, heads, value_dim]
    out,  # [rows, heads, value_dim] float32
    rows,
    heads,
    first,
    dim,
    value_dim,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1)
    width = heads * dim
    query = load_columns(q + h * dim, n, n < rows, width, 0, dim, DIM)
    total = tl.zeros((ROWS, VALUE), dtype=tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), dtype=tl.float32)
    tokens = first + rows
    end = tl.minimum(first + (tl.program_id(0) + 1) * ROWS, tokens)
    for start in range(0, end, KEYS):
        j = start + tl.arange(0, KEYS)
        key = load_columns(keys + h * dim, j, j < tokens, width, 0, dim, DIM).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = (j[None, :] <= first + n[:, None]) & (j < tokens)[None, :]
        p, total, top, norm = weigh(scores, seen, total, top, norm)
        value = load_columns(
            values + h * value_dim, j, j < tokens, heads * value_dim, 0, value_dim, VALUE
        )
        total += tl.dot(p.to(query.dtype), value.to(query.dtype), input_precision="ieee")
    c = tl.arange(0, VALUE)
    at = (n.to(tl.int64) * heads + h)[:, None] * value_dim + c[None, :]
    tl.store(out + at, total / norm[:, None], (n < rows)[:, None] & (c < value_dim)[None, :])


def attend_visible_triton(
    q: Tensor, latents: Tensor, visible: Tensor, value_dim: int, scale: float
) -> Tensor:
    """See `api.attend_visible`; contiguous arguments."""
    batch, rows, heads, dim = q.shape
    out = q.new_empty(batch, rows, heads, value_dim)
    common = torch.promote_types(q.dtype, latents.dtype)
    keys, warps, stages = _FLOAT32_TILE if common == torch.float32 else _TILE
    rest = dim - value_dim
    launch(
        _visible, (batch * rows, cdiv(heads, _HEADS)),
        q.to(common), latents, visible, out, rows, heads, latents.shape[1], dim, value_dim, scale,
        HEADS=_HEADS, KEYS=keys, VALUE=max(16, next_power_of_2(value_dim)),
        REST=max(16, next_power_of_2(rest)) if rest else 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def attend_expanded_triton(
    q: Tensor, keys: Tensor, values: Tensor, first: int, scale: float
) -> Tensor:
    """See `api.attend_expanded`; contiguous arguments."""
    rows, heads, dim = q.shape
    value_dim = values.shape[-1]
    out = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=q.device)
    common = torch.promote_types(q.dtype, keys.dtype)
    exact = common == torch.float32
    tile, warps, stages = _FLOAT32_TILE if exact else _TILE
    block = _FLOAT32_ROWS if exact else _ROWS
    launch(
        _expanded, (cdiv(rows, block), heads),
        q.to(common), keys, values, out, rows, heads, first, dim, value_dim, scale,
        ROWS=block, KEYS=tile, DIM=max(16, next_power_of_2(dim)),
        VALUE=max(16, next_power_of_2(value_dim)), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
