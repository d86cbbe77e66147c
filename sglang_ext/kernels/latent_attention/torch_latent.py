"""Latent attention in torch, in float32 over gathered rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_visible_torch(
    q: Tensor, latents: Tensor, visible: Tensor, value_dim: int, scale: float
) -> Tensor:
    """See `api.attend_visible`; arguments are taken as checked."""
    batch, rows, heads, dim = q.shape
    tokens = latents.shape[1]
    hidden = torch.arange(tokens, device=q.device) >= visible.unsqueeze(-1)
    # A row of the batch that is shorter may hold anything past its end, and 0 * NaN is NaN.
    beyond = hidden.all(dim=1)
    wide = latents.float().masked_fill(beyond.unsqueeze(-1), 0.0)
    scores = torch.bmm(q.float().reshape(batch, rows * heads, dim), wide.transpose(1, 2))
    scores = scores.view(batch, rows, heads, tokens).mul_(scale)
    scores.masked_fill_(hidden.unsqueeze(2), float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num_(nan=0.0)
    out = torch.bmm(weights.view(batch, rows * heads, tokens), wide[..., :value_dim])
    return out.view(batch, rows, heads, value_dim).to(q.dtype)


def attend_expanded_torch(
    q: Tensor, keys: Tensor, values: Tensor, first: int, scale: float
) -> Tensor:
    """See `api.attend_expanded`; arguments are taken as checked."""
    row = torch.arange(first, first + q.shape[0], device=q.device)
    seen = torch.arange(keys.shape[0], device=q.device) <= row.unsqueeze(1)
    q, keys, values = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)
    return out.squeeze(0).transpose(0, 1)
