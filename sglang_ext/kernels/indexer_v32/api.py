"""Checked entries to the indexer's selection."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.quant import FP8_BLOCK, as_bytes
from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.indexer_v32.torch_select import (
    select_tokens_fp8_torch,
    select_tokens_torch,
)
from sglang_ext.kernels.ordered import select_best


def select_tokens(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    visible: Tensor,
    top_k: int,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Positions of the `top_k` visible tokens with the highest index score.

    score[b, n, j] = sum_h weights[b, n, h] * ReLU(q[b, n, h] . keys[b, j] * dim^-1/2)

    Args:
        q: [batch, rows, heads, dim], index queries.
        weights: [batch, rows, heads] float32, may be negative.
        keys: [batch, tokens, dim], index keys; tokens beyond a row's `visible` may hold anything.
        visible: [batch, rows] int64, number of leading tokens that a row may see.
        top_k: at least 1.
        implementation: auto, torch or triton.

    Returns:
        [batch, rows, min(top_k, tokens)] int64, ascending, -1 after the last. The earlier token
        wins among equal scores.

    Raises:
        ValueError: shapes that contradict each other, with expected and found; an
            implementation that cannot run.
    """
    _check(q, weights, keys, visible, top_k)
    if not runs_triton("select_tokens", implementation, q.device):
        return select_tokens_torch(q, weights, keys, visible, top_k)
    from sglang_ext.kernels.indexer_v32.triton import scores_triton

    keys = keys.contiguous()

    def scores(part: slice, seen: Tensor) -> Tensor:
        return scores_triton(q[:, part].contiguous(), weights[:, part].contiguous(), keys, seen)

    return select_best(scores, _positions(keys), visible, top_k)


def select_tokens_fp8(
    q: tuple[Tensor, Tensor],
    weights: Tensor,
    keys: tuple[Tensor, Tensor],
    visible: Tensor,
    top_k: int,
    *,
    implementation: str = "auto",
) -> Tensor:
    """`select_tokens` over index vectors that are stored as fp8 with power-of-two scales.

    Args:
        q: codes [batch, rows, heads, dim] and scales [batch, rows, heads, ceil(dim / 128)], as
            `quant.act_quant` makes them of rows of `dim`.
        weights: [batch, rows, heads] float32.
        keys: codes [batch, tokens, dim] and scales [batch, tokens, ceil(dim / 128)].
        visible, top_k, implementation: as `select_tokens`.

    Codes are e4m3, scales ue8m0; both as their 8-bit float type or as uint8.

    Returns:
        As `select_tokens` of the decoded vectors.

    Raises:
        ValueError: as `select_tokens`; storage of another type.
    """
    (codes, q_scale), (key_codes, key_scale) = q, keys
    _check(codes, weights, key_codes, visible, top_k)
    blocks = -(-codes.shape[-1] // FP8_BLOCK)
    _expect("scales of q", q_scale, (*codes.shape[:-1], blocks))
    _expect("scales of keys", key_scale, (*key_codes.shape[:-1], blocks))
    for name, part, kind in (
        ("q", codes, torch.float8_e4m3fn),
        ("scales of q", q_scale, torch.float8_e8m0fnu),
        ("keys", key_codes, torch.float8_e4m3fn),
        ("scales of keys", key_scale, torch.float8_e8m0fnu),
    ):
        if part.dtype not in (torch.uint8, kind):
            raise ValueError(f"select_tokens: {name}: expected uint8 or {kind}, found {part.dtype}")
    stored_q = (as_bytes(codes), as_bytes(q_scale))
    stored_keys = (as_bytes(key_codes).contiguous(), as_bytes(key_scale).contiguous())
    if not runs_triton("select_tokens_fp8", implementation, codes.device):
        return select_tokens_fp8_torch(stored_q, weights, stored_keys, visible, top_k)
    from sglang_ext.kernels.indexer_v32.triton import byte_scores_triton

    def scores(part: slice, seen: Tensor) -> Tensor:
        rows = (stored_q[0][:, part].contiguous(), stored_q[1][:, part].contiguous())
        return byte_scores_triton(rows, weights[:, part].contiguous(), stored_keys, seen)

    return select_best(scores, _positions(key_codes), visible, top_k)


def _positions(keys: Tensor) -> Tensor:
    """[batch, tokens] int64, 0 .. tokens - 1."""
    batch, tokens = keys.shape[:2]
    return torch.arange(tokens, device=keys.device).expand(batch, -1)


def _check(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, top_k: int) -> None:
    batch, rows, heads, dim = q.shape
    _expect("weights", weights, (batch, rows, heads))
    _expect("visible", visible, (batch, rows))
    _expect("keys", keys, (batch, keys.shape[1], dim))
    if weights.dtype != torch.float32:
        raise ValueError(f"select_tokens: weights: expected float32, found {weights.dtype}")
    if top_k < 1:
        raise ValueError(f"select_tokens: top_k: expected at least 1, found {top_k}")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"select_tokens: {name}: expected {list(shape)}, found {list(tensor.shape)}"
        )
