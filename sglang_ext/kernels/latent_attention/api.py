"""Checked entries to latent attention.

Queries are absorbed (see core/mla.py) but for `attend_expanded`. Softmax and sums are in float32.
"""

from __future__ import annotations

from torch import Tensor

from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.latent_attention.torch_latent import (
    attend_expanded_torch,
    attend_visible_torch,
)


def attend_visible(
    q: Tensor,
    latents: Tensor,
    visible: Tensor,
    value_dim: int,
    scale: float,
    *,
    implementation: str = "auto",
) -> Tensor:
    """out[b, n, h] = softmax_j(scale * q[b, n, h] . c_j) c_j[:value_dim], j < visible[b, n].

    Args:
        q: [batch, rows, heads, dim].
        latents: [batch, tokens, dim]; what no row of its request sees may hold anything.
        visible: [batch, rows] int64, number of leading tokens that a row sees; 0 for padding.
        implementation: auto, torch or triton.

    Returns:
        [batch, rows, heads, value_dim], dtype of q; rows that see nothing are zero.

    Raises:
        ValueError: shapes that contradict each other, with expected and found; an
            implementation that cannot run.
    """
    batch, rows, _, dim = q.shape
    _expect("latents", latents, (batch, latents.shape[1], dim))
    _expect("visible", visible, (batch, rows))
    if not 1 <= value_dim <= dim:
        raise ValueError(f"latent attention: value_dim: expected 1 to {dim}, found {value_dim}")
    if not runs_triton("attend_visible", implementation, q.device):
        return attend_visible_torch(q, latents, visible, value_dim, scale)
    from sglang_ext.kernels.latent_attention.triton import attend_visible_triton

    whole = (q.contiguous(), latents.contiguous(), visible.contiguous())
    return attend_visible_triton(*whole, value_dim, scale)


def attend_expanded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    scale: float,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention of one request's rows first, first + 1, ... over its expanded tokens.

    Args:
        q: [rows, heads, dim].
        keys: [first + rows, heads, dim].
        values: [first + rows, heads, value dim].
        implementation: auto, torch or triton.

    Returns:
        [rows, heads, value dim] float32.

    Raises:
        ValueError: as `attend_visible`.
    """
    tokens, (_, heads, dim) = first + q.shape[0], q.shape
    _expect("keys", keys, (tokens, heads, dim))
    _expect("values", values, (tokens, heads, values.shape[-1]))
    if not runs_triton("attend_expanded", implementation, q.device):
        return attend_expanded_torch(q, keys, values, first, scale)
    from sglang_ext.kernels.latent_attention.triton import attend_expanded_triton

    whole = (q.contiguous(), keys.contiguous(), values.contiguous())
    return attend_expanded_triton(*whole, first, scale)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"latent attention: {name}: expected {list(shape)}, found {list(tensor.shape)}"
        )
