"""Activations, output gates and the splitting of fused projections."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def fused_sigmoid_mul_cpu(input: torch.Tensor, gate: torch.Tensor) -> None:
    """input *= sigmoid(gate), in place, computed in float32.

    Args:
        input: [rows, heads * head_dim].
        gate: the same number of elements, also as [rows, heads, head_dim] and strided.
    """
    gated = input.float() * gate.reshape(input.shape).float().sigmoid()
    input.copy_(gated)


def silu_and_mul_cpu(input: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half over the last axis: [..., 2 * dim] -> [..., dim]."""
    gate, up = input.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(input.dtype)


def gelu_and_mul_cpu(input: torch.Tensor) -> torch.Tensor:
    """gelu(first half) * second half over the last axis: [..., 2 * dim] -> [..., dim]."""
    gate, up = input.float().chunk(2, dim=-1)
    return (F.gelu(gate) * up).to(input.dtype)


def gelu_tanh_and_mul_cpu(input: torch.Tensor) -> torch.Tensor:
    """As `gelu_and_mul_cpu` with the tanh approximation."""
    gate, up = input.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(input.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits a projection laid out as (all q, all k, all v, all z) and (all b, all a).

    Args:
        mixed_qkvz: [rows, 2 * heads_qk * head_qk + 2 * heads_v * head_v].
        mixed_ba: [rows, 2 * heads_v].

    Returns:
        qkv [rows, 2 * heads_qk * head_qk + heads_v * head_v], z [rows, heads_v, head_v],
        b and a [rows, heads_v]; all contiguous.
    """
    rows = mixed_qkvz.shape[0]
    value_dim = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + value_dim, value_dim], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    return (
        qkv.contiguous(),
        z.reshape(rows, num_heads_v, head_v).contiguous(),
        b.contiguous(),
        a.contiguous(),
    )


def fused_qkvzba_split_reshape_cat_cpu(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the contiguous variant, for a projection that holds (q, k, v, z) head group by head group.

    A group is one query/key head with its `heads_v / heads_qk` value heads; `mixed_ba` holds
    (b, a) group by group likewise.
    """
    rows = mixed_qkvz.shape[0]
    group_v = num_heads_v // num_heads_qk * head_v
    groups = mixed_qkvz.reshape(rows, num_heads_qk, 2 * head_qk + 2 * group_v)
    q, k, v, z = groups.split([head_qk, head_qk, group_v, group_v], dim=-1)
    b, a = mixed_ba.unflatten(1, (num_heads_qk, -1)).chunk(2, dim=-1)
    return (
        torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1),
        z.reshape(rows, num_heads_v, head_v).contiguous(),
        b.reshape(rows, num_heads_v).contiguous(),
        a.reshape(rows, num_heads_v).contiguous(),
    )
