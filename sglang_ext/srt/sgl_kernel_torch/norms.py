"""Root-mean-square norms of several models' own forward code, computed in float32.

Everywhere `norm(x) = x / sqrt(mean(x^2) + eps)` over the last axis, and the result has the dtype
of the input.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _gemma_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x) * (1 + weight) per head; x [..., head_dim]."""
    return (_normalised(x, eps) * (1.0 + weight.float())).to(x.dtype)


def rmsnorm_cpu(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x) * weight; input [..., hidden], weight [hidden]."""
    return (_normalised(input, eps) * weight.float()).to(input.dtype)


def l2norm_cpu(input: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x) without a weight; input [..., hidden]."""
    return _normalised(input, eps).to(input.dtype)


def fused_rmsnorm_gated_cpu(
    input: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """norm(x) * weight * silu(gate); input and gate [rows, hidden], weight [hidden]."""
    scaled = _normalised(input, eps) * weight.float()
    return (scaled * F.silu(gate.float())).to(input.dtype)


def fused_dual_residual_rmsnorm_cpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """mid = residual + norm(x) * weight1; returns (norm(mid) * weight2, mid).

    Args:
        x, residual: [rows, hidden].
        weight1, weight2: [hidden].
    """
    mid = residual + rmsnorm_cpu(x, weight1, eps)
    return rmsnorm_cpu(mid, weight2, eps), mid


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-head norm(x) * (1 + weight) of query and key.

    Args:
        q: [rows, heads * head_dim].
        k: [rows, kv_heads * head_dim].
        q_weight, k_weight: [head_dim].

    Returns:
        Tensors shaped as q and k.
    """
    q_heads = q.unflatten(-1, (-1, head_dim))
    k_heads = k.unflatten(-1, (-1, head_dim))
    return (
        _gemma_heads(q_heads, q_weight, eps).flatten(1),
        _gemma_heads(k_heads, k_weight, eps).flatten(1),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_head: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `fused_qk_gemma_rmsnorm_cpu` for a query that comes with its output gate.

    Args:
        q_gate: [rows, heads * 2 * head_dim], every head as (query, gate).
        k: [rows, kv_heads * head_dim].
        q_weight, k_weight: [head_dim].

    Returns:
        q [rows * heads, head_dim], k [rows * kv_heads, head_dim], gate [rows * heads, head_dim].
    """
    q, gate = q_gate.reshape(-1, 2, head_dim).unbind(1)
    return (
        _gemma_heads(q, q_weight, eps),
        _gemma_heads(k.reshape(-1, head_dim), k_weight, eps),
        gate.contiguous(),
    )


def fused_qk_rmsnorm_sumsq_cpu(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Sums of squares of every row; q [rows, q_dim], k [rows, k_dim] -> [rows, 2] float32."""
    return torch.stack([q.float().square().sum(-1), k.float().square().sum(-1)], dim=-1)


def fused_qk_rmsnorm_apply_from_stats_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    sum_sq: torch.Tensor,
    world_size: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm over rows that are split across ranks, from sums of squares added over the ranks.

    Args:
        q, k: [rows, q_dim], [rows, k_dim], this rank's share.
        q_weight, k_weight: [q_dim], [k_dim].
        sum_sq: [rows, 2] float32 for q and k.
        world_size: ranks that hold a share each.
    """

    def scaled(x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        mean = squares.unsqueeze(-1) / (x.shape[-1] * world_size)
        return (x.float() * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)

    return scaled(q, q_weight, sum_sq[:, 0]), scaled(k, k_weight, sum_sq[:, 1])


def fused_qk_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(q) * q_weight and norm(k) * k_weight over whole rows."""
    return rmsnorm_cpu(q, q_weight, eps), rmsnorm_cpu(k, k_weight, eps)
