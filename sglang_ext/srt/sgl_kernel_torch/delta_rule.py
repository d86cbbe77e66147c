"""Gated delta rule: the linear attention of Qwen3-Next and its kin (arXiv 2412.06464, eq. 10).

A value head keeps a state S [value_dim, key_dim], float32. Per token, with decay g <= 0 and
write strength beta:
    S <- exp(g) S
    S <- S + beta (v - S k) k^T
    o  = S q / sqrt(key_dim)
Query and key are divided by their length first when asked. A query/key head serves
`value_heads / key_heads` neighbouring value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

PAD_SLOT = -1
_LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class _Tokens:
    """Inputs per token, float32: q, k [tokens, heads, key_dim], v [tokens, heads, value_dim],
    decay [tokens, heads] (already exponentiated), beta [tokens, heads]; heads are value heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalise: bool,
) -> _Tokens:
    heads, value_dim = v.shape[-2:]
    group = heads // k.shape[-2]
    q, k = (x.reshape(-1, *x.shape[-2:]).float() for x in (q, k))
    if normalise:
        q, k = _unit(q), _unit(k)
    return _Tokens(
        (q * q.shape[-1] ** -0.5).repeat_interleave(group, dim=1),
        k.repeat_interleave(group, dim=1),
        v.reshape(-1, heads, value_dim).float(),
        g.reshape(-1, heads).float().exp(),
        beta.reshape(-1, heads).float(),
    )


def _step(state: torch.Tensor, tokens: _Tokens, at: torch.Tensor) -> torch.Tensor:
    """Advances state [n, heads, value_dim, key_dim] by one token each, in place; returns o."""
    k = tokens.k[at].unsqueeze(-1)
    state *= tokens.decay[at].view(*state.shape[:2], 1, 1)
    error = tokens.v[at] - (state @ k).squeeze(-1)
    write = tokens.beta[at].unsqueeze(-1) * error
    state += write.unsqueeze(-1) * tokens.k[at].unsqueeze(-2)
    return (state @ tokens.q[at].unsqueeze(-1)).squeeze(-1)


def _gate(
    a_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, beta: float, threshold: float
) -> torch.Tensor:
    """g = -exp(A) * softplus(a + dt_bias), float32."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and write strength of every token.

    Args:
        A_log, dt_bias: [heads].
        a, b: [tokens, heads].

    Returns:
        g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b), [1, tokens, heads] float32.
    """
    g = _gate(A_log, a, dt_bias, 1.0, 20.0)
    return g.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Runs packed sequences through their states; all of them advance together, token by token.

    Args:
        q, k: [1, tokens, key_heads, key_dim].
        v: [1, tokens, heads, value_dim].
        g, beta: [1, tokens, heads].
        initial_state: [slots, heads, value_dim, key_dim], written in place.
        cu_seqlens: [batch + 1] int.
        initial_state_indices: [batch] int; -1 starts from zeros and is not written back.

    Returns:
        o [1, tokens, heads, value_dim], the last states [batch, heads, value_dim, key_dim]
        float32, and None for the states per chunk.

    Raises:
        NotImplementedError: head_first layout.
    """
    if head_first:
        raise NotImplementedError(
            "chunk_gated_delta_rule_cpu: head_first: expected False, found True; pass tensors as "
            "[1, tokens, heads, dim]"
        )
    tokens = _tokens(q, k, v, g, beta, use_qk_l2norm_in_kernel)
    starts = cu_seqlens.long()
    lengths = starts.diff()
    slots = initial_state_indices.long()
    state = _load(initial_state, slots)
    out = torch.zeros_like(tokens.v)
    for step in range(int(lengths.max()) if lengths.numel() else 0):
        live = torch.nonzero(lengths > step).squeeze(1)
        at = starts[live] + step
        moving = state[live]
        out[at] = _step(moving, tokens, at)
        state[live] = moving
    _save(initial_state, slots, state)
    return out.to(v.dtype).unsqueeze(0), state, None


def _load(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    state = pool[slots.clamp(min=0)].float()
    return torch.where((slots != PAD_SLOT).view(-1, 1, 1, 1), state, 0.0)


def _save(pool: torch.Tensor, slots: torch.Tensor, state: torch.Tensor) -> None:
    kept = slots != PAD_SLOT
    pool[slots[kept]] = state[kept].to(pool.dtype)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """One decode step: gating and the delta rule for one token per sequence.

    Args:
        A_log, dt_bias: [heads].
        q, k: [1, batch, key_heads, key_dim].
        v: [1, batch, heads, value_dim].
        a, b: [batch, heads], inputs of decay and write strength.
        initial_state_source: [slots, heads, value_dim, key_dim], written in place.
        initial_state_indices: [batch] int; -1 marks a padded row.
        cu_seqlens: [batch + 1] int.

    Returns:
        [1, batch, heads, value_dim].
    """
    g = _gate(A_log, a, dt_bias, softplus_beta, softplus_threshold)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g.unsqueeze(0),
        b.float().sigmoid().unsqueeze(0),
        initial_state_source,
        cu_seqlens,
        False,
        use_qk_l2norm_in_kernel,
        initial_state_indices,
    )
    return out
