"""DeepSpec's objective: cross entropy, total variation and the confidence head's calibration.

Weights 0.1, 0.9 and 1.0 and a position weight exp(-k / 4) are those of its published configs
(arXiv:2607.05147, section 3; where paper and code differ, the code's decay constant of 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms and the decay constant of the position weight."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def positions(self, gamma: int) -> Tensor:
        """[gamma] weight of each drafted position."""
        return torch.exp(-torch.arange(gamma) / self.decay)


@dataclass(frozen=True)
class Labels:
    """What the target says at each predicted row.

    token: [rows] int64 draft id of the text's next token, -1 where the draft has no such token.
    best: [rows, n] int64 draft ids of the target's likeliest tokens.
    probability: [rows, n] fp32 their probabilities.
    """

    token: Tensor
    best: Tensor
    probability: Tensor


def target_labels(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) of the `count` likeliest tokens of logits [rows, draft_vocab]."""
    best = logits.float().topk(count, dim=-1)
    lse = logits.float().logsumexp(-1, keepdim=True)
    return best.indices, (best.values - lse).exp()


def competing_tokens(
    labels: Labels, draft_vocab: int, extra: int, generator: torch.Generator
) -> tuple[Tensor, Labels]:
    """A part of the vocabulary to train on: every token that a label names, and `extra` others.

    The logits are most of a small draft's work, and nearly all of a softmax's gradient goes to
    these tokens.

    Returns:
        Draft ids [n] in ascending order, and the labels renumbered to index into them.
    """
    wanted = torch.zeros(draft_vocab, dtype=torch.bool)
    wanted[labels.best.flatten()] = True
    wanted[labels.token[labels.token >= 0]] = True
    wanted[torch.randint(draft_vocab, (extra,), generator=generator)] = True
    subset = wanted.nonzero().squeeze(1)
    number = wanted.cumsum(0) - 1
    token = number[labels.token.clamp_min(0)].masked_fill(labels.token < 0, -1)
    return subset, Labels(token, number[labels.best], labels.probability)


def block_loss(
    logits: Tensor,
    confidence: Tensor | None,
    labels: Labels,
    weight: Tensor,
    weights: LossWeights,
) -> tuple[Tensor, dict[str, float]]:
    """The weighted loss of predicted rows.

    The total variation runs over the target's likeliest tokens only: what the draft gives to all
    others adds nothing to the overlap that decides acceptance.

    Args:
        logits: [rows, draft_vocab]. confidence: [rows] raw, or None.
        weight: [rows] fp32, 0 for padding.
    """
    total = weight.sum().clamp_min(1e-6)
    surprise, overlap = _Match.apply(logits, labels.token, labels.best, labels.probability)
    cross_entropy = (surprise * weight).sum() / total
    variation = ((1 - overlap) * weight).sum() / total
    loss = weights.cross_entropy * cross_entropy + weights.total_variation * variation
    report = {"ce": float(cross_entropy.detach()), "tv": float(variation.detach())}
    if confidence is not None:
        accepted = overlap.detach().clamp(0, 1)
        bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        calibration = (bce * weight).sum() / total
        loss = loss + weights.confidence * calibration
        report["conf"] = float(calibration.detach())
    return loss, report


class _Match(torch.autograd.Function):
    """(-log q(token) or 0 where token < 0, sum over `best` of min(q, p)), both [rows] fp32.

    One dense pass forward and one backward, in the dtype of the logits: with q = softmax(logits)
    both gradients are a multiple of q plus a few sparse entries.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token: Tensor, best: Tensor, probability: Tensor
    ) -> tuple[Tensor, Tensor]:
        top = logits.amax(-1, keepdim=True)
        dense = (logits - top).exp_()
        mass = dense.sum(-1, dtype=torch.float32, keepdim=True)
        at = token.clamp_min(0)[:, None]
        known = token >= 0
        picked = (logits.gather(1, at) - top).float() - mass.log()
        drafted = dense.gather(1, best).float() / mass
        ctx.save_for_backward(dense, mass, at, known, best, drafted, drafted < probability)
        return -picked.squeeze(1) * known, torch.minimum(drafted, probability).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dense, mass, at, known, best, drafted, below = ctx.saved_tensors
        surprise, overlap = grads[0] * known, grads[1]
        drafted = drafted * below
        factor = (surprise - overlap * drafted.sum(-1))[:, None] / mass
        out = dense * factor.to(dense.dtype)
        out.scatter_add_(1, best, (overlap[:, None] * drafted).to(out.dtype))
        out.scatter_add_(1, at, -surprise[:, None].to(out.dtype))
        return out, None, None, None
