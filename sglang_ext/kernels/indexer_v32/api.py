"""Checked entry to the indexer's selection."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.kernels.indexer_v32.torch_select import select_tokens_torch


def select_tokens(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Positions of the `top_k` visible tokens with the highest index score.

    score[b, n, j] = sum_h weights[b, n, h] * ReLU(q[b, n, h] . keys[b, j] * dim^-1/2)

    Args:
        q: [batch, rows, heads, dim], index queries.
        weights: [batch, rows, heads] float32, may be negative.
        keys: [batch, tokens, dim], index keys; tokens beyond a row's `visible` may hold anything.
        visible: [batch, rows] int64, number of leading tokens that a row may see.
        top_k: at least 1.

    Returns:
        [batch, rows, min(top_k, tokens)] int64, ascending, -1 after the last. The earlier token
        wins among equal scores.

    Raises:
        ValueError: shapes that contradict each other, with expected and found.
    """
    _check(q, weights, keys, visible, top_k)
    return select_tokens_torch(q, weights, keys, visible, top_k)


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
