"""How likely each draft is to be accepted: head, calibration, prefix survival.

c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] / T_k) estimates the acceptance of x_k given that its
predecessors were accepted (arXiv:2607.05147, 3.2.1). It never sees x_k itself: a token that had a
say in its own verification would bias the output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """One linear unit over the draft's hidden state and, optionally, the Markov embedding.

    hidden_size: d; markov_rank: r, 0 leaves the embedding out; bias: absent in V4 checkpoints
    """

    def __init__(self, hidden_size: int, markov_rank: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.with_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1, bias=bias)

    def forward(self, hidden: Tensor, embedding: Tensor | None = None) -> Tensor:
        """Raw logits in fp32.

        hidden: [R, G, d], embedding: [R, G, r] of the previous tokens  ->  [R, G]
        """
        parts = hidden if embedding is None else torch.cat((hidden, embedding), dim=-1)
        weight = self.proj.weight.to(parts.dtype)
        bias = None if self.proj.bias is None else self.proj.bias.to(parts.dtype)
        return F.linear(parts, weight, bias).squeeze(-1).float()


def survivals(confidence: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Probability that each draft is reached and accepted, a_k = prod_{j<=k} c_j.

    confidence: [R, G] raw logits, temperatures: [G] or None  ->  [R, G], non-increasing along G
    """
    scaled = confidence if temperatures is None else confidence / temperatures
    return scaled.sigmoid().cumprod(dim=-1)
