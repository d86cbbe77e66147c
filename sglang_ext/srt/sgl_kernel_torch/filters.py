"""Top-k and top-p as masks on probabilities, in the order in which SGLang's sampler applies them.

SGLang's PyTorch sampler measures the mass in front of a token on the probabilities as they were
before top-k. Neither function here rescales, so that applying one after the other does the same;
whoever draws divides by what is left.
"""

from __future__ import annotations

import torch


def keep_top_k(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Zeroes all but the k largest of each row.

    Args:
        probs: [rows, vocab].
        top_ks: [rows] int, at least 1.

    Returns:
        [rows, vocab].
    """
    ordered, column = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept = ordered.masked_fill(rank >= top_ks.view(-1, 1), 0.0)
    return torch.zeros_like(probs).scatter_(-1, column, kept)


def keep_top_p(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Zeroes the tokens of each row that have a mass greater than p in front of them.

    Args:
        probs: [rows, vocab].
        top_ps: [rows] float in (0, 1].

    Returns:
        [rows, vocab].
    """
    ordered, column = probs.sort(dim=-1, descending=True)
    in_front = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(in_front > top_ps.view(-1, 1), 0.0)
    return torch.zeros_like(probs).scatter_(-1, column, kept)
