"""The indexer's scores in Triton, over index vectors or their fp8 bytes; the choice stays in torch.

One program scores a tile of tokens for a few query rows of the same request, so a key is loaded
once for all of them, and the scores of single heads never exist in memory. Bytes are decoded from
their bits into float16, which holds every e4m3 value: products are exact, sums are float32, and
scales, powers of two, come behind the sum of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.quant import FP8_BLOCK
from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2
from sglang_ext.kernels.quant.triton import e4m3_to_float, ue8m0_to_float

_ROWS = 8
_TOKENS = 32


@triton.jit
def _scores(
    q,  # [batch, rows, heads, dim]
    weights,  # [batch, rows, heads] float32
    keys,  # [batch, tokens, dim]
    visible,  # [batch, rows] int64
    out,  # [batch, rows, tokens] float32, written where visible
    rows,
    heads,
    dim,
    tokens,
    scale,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    start = tl.program_id(2) * TOKENS
    j = start + tl.arange(0, TOKENS)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    inside = (j < tokens)[None, :] & (d < dim)[:, None]
    key = tl.load(keys + b * tokens * dim + j[None, :] * dim + d[:, None], inside, 0.0)
    key = key.to(q.dtype.element_ty)
    first = tl.program_id(1) * ROWS
    for n in range(first, tl.minimum(first + ROWS, rows)):
        row = b * rows + n
        seen = tl.load(visible + row)
        if start < seen:
            head = (row * heads + h)[:, None]
            live = (h < heads)[:, None] & (d < dim)[None, :]
            query = tl.load(q + head * dim + d[None, :], live, 0.0)
            weight = tl.load(weights + row * heads + h, h < heads, 0.0)
            products = tl.maximum(tl.dot(query, key, input_precision="ieee") * scale, 0.0)
            score = tl.sum(products * weight[:, None], axis=0)
            tl.store(out + row * tokens + j, score, j < seen)


@triton.jit
def _byte_scores(
    q,  # [batch, rows, heads, dim] uint8, e4m3
    q_scale,  # [batch, rows, heads, blocks] uint8, ue8m0
    weights,  # [batch, rows, heads] float32
    keys,  # [batch, tokens, dim] uint8
    key_scale,  # [batch, tokens, blocks] uint8
    visible,  # [batch, rows] int64
    out,  # [batch, rows, tokens] float32, written where visible
    rows,
    heads,
    dim,
    tokens,
    scale,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    start = tl.program_id(2) * TOKENS
    j = start + tl.arange(0, TOKENS)
    h = tl.arange(0, HEADS)
    i = tl.arange(0, PADDED)
    token = b * tokens + j
    first = tl.program_id(1) * ROWS
    for n in range(first, tl.minimum(first + ROWS, rows)):
        row = b * rows + n
        seen = tl.load(visible + row)
        if start < seen:
            head = row * heads + h
            products = tl.zeros((HEADS, TOKENS), dtype=tl.float32)
            for block in tl.static_range(BLOCKS):
                d = block * BLOCK + i
                inside = (i < BLOCK) & (d < dim)
                at = token[None, :] * dim + d[:, None]
                key = tl.load(keys + at, (j < tokens)[None, :] & inside[:, None], 0)
                at = head[:, None] * dim + d[None, :]
                query = tl.load(q + at, (h < heads)[:, None] & inside[None, :], 0)
                part = tl.dot(
                    e4m3_to_float(query).to(tl.float16), e4m3_to_float(key).to(tl.float16)
                )
                fq = ue8m0_to_float(tl.load(q_scale + head * BLOCKS + block, h < heads, 127))
                fk = ue8m0_to_float(tl.load(key_scale + token * BLOCKS + block, j < tokens, 127))
                products += part * fq[:, None] * fk[None, :]
            weight = tl.load(weights + row * heads + h, h < heads, 0.0)
            products = tl.maximum(products * scale, 0.0)
            score = tl.sum(products * weight[:, None], axis=0)
            tl.store(out + row * tokens + j, score, j < seen)


def scores_triton(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Scores as `api.select_tokens` defines them, [batch, rows, tokens] float32.

    Tokens that a row does not see hold whatever was in memory.
    """
    batch, rows, heads, dim = q.shape
    tokens = keys.shape[1]
    out = torch.empty(batch, rows, tokens, dtype=torch.float32, device=q.device)
    launch(
        _scores, (batch, cdiv(rows, _ROWS), cdiv(tokens, _TOKENS)),
        q.to(torch.promote_types(q.dtype, keys.dtype)), weights, keys, visible, out,
        rows, heads, dim, tokens, dim**-0.5,
        ROWS=_ROWS, HEADS=max(16, next_power_of_2(heads)), DIM=max(16, next_power_of_2(dim)),
        TOKENS=_TOKENS,
    )  # fmt: skip
    return out


def byte_scores_triton(
    q: tuple[Tensor, Tensor], weights: Tensor, keys: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """As `scores_triton`; q and keys are (codes, scales) of `api.select_tokens_fp8`."""
    codes, q_scale = q
    batch, rows, heads, dim = codes.shape
    tokens, block = keys[0].shape[1], min(FP8_BLOCK, dim)
    out = torch.empty(batch, rows, tokens, dtype=torch.float32, device=codes.device)
    launch(
        _byte_scores, (batch, cdiv(rows, _ROWS), cdiv(tokens, _TOKENS)),
        codes, q_scale, weights, *keys, visible, out, rows, heads, dim, tokens, dim**-0.5,
        ROWS=_ROWS, HEADS=max(16, next_power_of_2(heads)), BLOCK=block,
        PADDED=max(16, next_power_of_2(block)), BLOCKS=cdiv(dim, block), TOKENS=_TOKENS,
    )  # fmt: skip
    return out
