"""Hyper-connections in Triton: two kernels before a sublayer, one after it.

`_project` computes the small products fn x and the sum of squares. One token's product is as long
as all its streams, so the axis is cut into a fixed number of parts that run side by side; their
partial sums are added in a fixed order by the next kernel. A token's result therefore depends
neither on how many tokens came with it nor on timing.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.hyper_connection import HcMix
from sglang_ext.kernels.launch import cdiv, launch, next_power_of_2

_SPLITS = 16
_BLOCK_TOKENS = 16
_BLOCK_K = 32
_BLOCK_D = 512


@triton.jit
def _project(
    streams,  # [tokens, width]
    fn,  # [outs, width] float32
    partial,  # [SPLITS, tokens, OUTS + 1] float32, last column the sum of squares
    tokens,
    width,
    outs,
    part,  # columns of one split
    OUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    split = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.arange(0, OUTS)
    k = tl.arange(0, BLOCK_K)
    product = tl.zeros((BLOCK_T, OUTS), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T,), dtype=tl.float32)
    row = t.to(tl.int64)[:, None] * width
    stop = tl.minimum((split + 1) * part, width)
    for start in range(split * part, stop, BLOCK_K):
        column = start + k
        inside = column < stop
        x = tl.load(streams + row + column[None, :], (t < tokens)[:, None] & inside[None, :], 0.0)
        x = x.to(tl.float32)
        w = tl.load(
            fn + o[None, :] * width + column[:, None], (o < outs)[None, :] & inside[:, None], 0.0
        )
        product += tl.dot(x, w, input_precision="ieee")
        squares += tl.sum(x * x, axis=1)
    base = partial + (split * tokens.to(tl.int64) + t)[:, None] * (OUTS + 1)
    tl.store(base + o[None, :], product, (t < tokens)[:, None])
    tl.store(partial + (split * tokens.to(tl.int64) + t) * (OUTS + 1) + OUTS, squares, t < tokens)


@triton.jit
def _inverse_rms(partial, t, tokens, width, rms_eps, OUTS: tl.constexpr, SPLITS: tl.constexpr):
    squares = tl.full((), 0.0, tl.float32)
    for split in tl.static_range(SPLITS):
        squares += tl.load(partial + (split * tokens + t) * (OUTS + 1) + OUTS)
    return 1.0 / tl.sqrt_rn(tl.div_rn(squares, width.to(tl.float32)) + rms_eps)


@triton.jit
def _summed(partial, t, tokens, o, OUTS: tl.constexpr, SPLITS: tl.constexpr):
    """Columns `o` of a token's product, over the splits in order."""
    total = tl.zeros(o.shape, dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * tokens + t) * (OUTS + 1) + o)
    return total


@triton.jit
def _collapse(
    streams,  # [tokens, N, width]
    partial,
    base,
    scale,
    x,  # [tokens, width], dtype of streams
    post,  # [tokens, N] float32
    comb,  # [tokens, N, N] float32
    tokens_,
    width,
    eps,
    rms_eps,
    N: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weights of one token, then a tile of sum_i pre_i X_i. HEAD: pre is all there is."""
    t = tl.program_id(0).to(tl.int64)
    tokens = tokens_.to(tl.int64)
    n = tl.arange(0, N)
    inverse = _inverse_rms(partial, t, tokens, N * width, rms_eps, OUTS, SPLITS)
    pre = _summed(partial, t, tokens, n, OUTS, SPLITS) * inverse * tl.load(scale)
    pre = tl.sigmoid(pre + tl.load(base + n)) + eps
    if not HEAD and tl.program_id(1) == 0:
        spread = _summed(partial, t, tokens, N + n, OUTS, SPLITS) * inverse * tl.load(scale + 1)
        spread = 2.0 * tl.sigmoid(spread + tl.load(base + N + n))
        tl.store(post + t * N + n, spread)
        cell = n[:, None] * N + n[None, :]
        logits = _summed(partial, t, tokens, 2 * N + cell, OUTS, SPLITS) * inverse
        logits = logits * tl.load(scale + 2) + tl.load(base + 2 * N + cell)
        exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        matrix = exponentials / tl.sum(exponentials, axis=1)[:, None] + eps
        matrix = matrix / (tl.sum(matrix, axis=0)[None, :] + eps)
        for _ in range(ITERS - 1):
            matrix = matrix / (tl.sum(matrix, axis=1)[:, None] + eps)
            matrix = matrix / (tl.sum(matrix, axis=0)[None, :] + eps)
        tl.store(comb + t * N * N + cell, matrix)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tile = tl.load(streams + (t * N + n)[:, None] * width + d[None, :], (d < width)[None, :], 0.0)
    mixed = tl.sum(pre[:, None] * tile.to(tl.float32), axis=0)
    tl.store(x + t * width + d, mixed.to(x.dtype.element_ty), d < width)


@triton.jit
def _spread(
    y,  # [tokens, width]
    streams,  # [tokens, N, width]
    post,
    comb,
    out,  # [tokens, N, width]
    width,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    new = tl.arange(0, N)
    inside = (d < width)[None, :]
    update = tl.load(y + t * width + d, d < width, 0.0).to(tl.float32)
    total = tl.load(post + t * N + new)[:, None] * update[None, :]
    for old in tl.static_range(N):
        # Row `old` of comb: its share in every new stream.
        share = tl.load(comb + (t * N + old) * N + new)
        stream = tl.load(streams + (t * N + old) * width + d, d < width, 0.0).to(tl.float32)
        total += share[:, None] * stream[None, :]
    target = out + (t * N + new)[:, None] * width + d[None, :]
    tl.store(target, total.to(out.dtype.element_ty), inside)


def _run_project(streams: Tensor, fn: Tensor, outs: int) -> tuple[Tensor, int]:
    tokens, width = streams.shape[0], streams.shape[1] * streams.shape[2]
    padded = max(16, next_power_of_2(outs))
    part = cdiv(cdiv(width, _SPLITS), _BLOCK_K) * _BLOCK_K
    partial = torch.empty(_SPLITS, tokens, padded + 1, dtype=torch.float32, device=streams.device)
    grid = (cdiv(tokens, _BLOCK_TOKENS), _SPLITS)
    launch(
        _project, grid, streams, fn, partial, tokens, width, outs, part,
        OUTS=padded, BLOCK_T=_BLOCK_TOKENS, BLOCK_K=_BLOCK_K,
        num_stages=2,
    )  # fmt: skip
    return partial, padded


def _run_collapse(
    streams: Tensor,
    partial: Tensor,
    outs: int,
    mix: HcMix,
    base: Tensor,
    scale: Tensor,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    head: bool,
) -> None:
    tokens, n, width = streams.shape
    launch(
        _collapse, (tokens, cdiv(width, _BLOCK_D)),
        streams, partial, base, scale, mix.x, mix.post, mix.comb, tokens, width, eps, rms_eps,
        N=n, OUTS=outs, SPLITS=_SPLITS, ITERS=iters, HEAD=head, BLOCK_D=_BLOCK_D,
    )  # fmt: skip


def hc_pre_triton(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
) -> HcMix:
    """See `api.hc_pre`; contiguous arguments, n a power of two."""
    tokens, n, width = streams.shape
    partial, outs = _run_project(streams, fn, n * (2 + n))
    mix = HcMix(
        streams.new_empty(tokens, width),
        partial.new_empty(tokens, n),
        partial.new_empty(tokens, n, n),
    )
    _run_collapse(
        streams, partial, outs, mix, base, scale,
        iters=iters, eps=eps, rms_eps=rms_eps, head=False,
    )  # fmt: skip
    return mix


def hc_post_triton(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `api.hc_post`; contiguous arguments, n a power of two."""
    tokens, n, width = streams.shape
    out = torch.empty_like(streams)
    grid = (tokens, cdiv(width, _BLOCK_D))
    launch(_spread, grid, y, streams, post, comb, out, width, N=n, BLOCK_D=_BLOCK_D)
    return out


def hc_head_triton(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, rms_eps: float
) -> Tensor:
    """See `api.hc_head`; contiguous arguments, n a power of two."""
    tokens, n, width = streams.shape
    partial, outs = _run_project(streams, fn, n)
    # post and comb are not written for the head; any float32 pointer will do.
    mix = HcMix(streams.new_empty(tokens, width), partial, partial)
    _run_collapse(
        streams, partial, outs, mix, base, scale,
        iters=1, eps=eps, rms_eps=rms_eps, head=True,
    )  # fmt: skip
    return mix.x
