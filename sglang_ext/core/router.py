"""Which experts a token goes to, and how much each weighs.

Three rules, all with the same weights: the chosen scores, divided by their sum, times a factor.
    sqrtsoftplus top-k      DeepSeek-V4: score + bias decides, the score alone weighs
    hash                    DeepSeek-V4, first layers: a table decides by token id
    grouped sigmoid top-k   DeepSeek-V3.2: whole groups of experts are ruled out first

Equal scores: the lowest expert wins, on every device and for every number of tokens. torch.topk
promises no order among equals, so it is not used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Added to the sum of the chosen scores, so that all-zero scores divide to 0.
_NORM_EPS = 1e-20


class ExpertChoice(NamedTuple):
    """A router's answer.

    Attributes:
        ids: [tokens, top_k] int64, number of the expert, by falling selection score.
        weights: [tokens, top_k] float32.
    """

    ids: Tensor
    weights: Tensor


def sqrt_softplus(logits: Tensor) -> Tensor:
    """sqrt(log(1 + e^logits)) in float32, any shape."""
    return F.softplus(logits.float()).sqrt()


def top_k_stable(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, the lowest index first among equals.

    scores [rows, n], k <= n -> [rows, k] int64, by falling score.
    """
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def normalised_weights(scores: Tensor, ids: Tensor, scaling: float) -> Tensor:
    """scores[ids] / (their sum + 1e-20) * scaling.

    scores [tokens, experts], ids [tokens, top_k] -> [tokens, top_k] float32.
    """
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(dim=-1, keepdim=True) + _NORM_EPS) * scaling


def route_sqrtsoftplus(logits: Tensor, bias: Tensor, *, top_k: int, scaling: float) -> ExpertChoice:
    """Top-k of p + bias with p = sqrt(softplus(logits)); weights from p, without the bias.

    Args:
        logits: [tokens, experts], router output.
        bias: [experts] float32, moves the selection only (auxiliary-loss-free balancing).
        top_k: experts per token.
        scaling: the routed scaling factor.
    """
    scores = sqrt_softplus(logits)
    ids = top_k_stable(scores + bias.float(), top_k)
    return ExpertChoice(ids, normalised_weights(scores, ids, scaling))


def route_hash(
    logits: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scaling: float
) -> ExpertChoice:
    """Experts tid2eid[token id], weighted by sqrt(softplus(logits)).

    Args:
        logits: [tokens, experts], router output; decides the weights only.
        token_ids: [tokens] int, the input ids of these rows.
        tid2eid: [vocabulary, top_k] int, experts of each token id.
        scaling: the routed scaling factor.
    """
    ids = tid2eid[token_ids].long()
    return ExpertChoice(ids, normalised_weights(sqrt_softplus(logits), ids, scaling))


def route_grouped_sigmoid(
    logits: Tensor,
    bias: Tensor,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    scaling: float,
) -> ExpertChoice:
    """Top-k of sigmoid(logits) + bias inside the best topk_group of n_group expert groups.

    A group is as good as the sum of its two best biased scores. Experts of the other groups are
    out (-inf), even where every biased score of the kept groups is negative.

    Args:
        logits: [tokens, experts]; experts % n_group == 0, at least two experts in a group.
        bias: [experts] float32, moves the selection only.
        n_group, topk_group: how many groups there are, and how many stay.
        top_k: experts per token, at most topk_group * experts / n_group.
        scaling: the routed scaling factor.
    """
    tokens, experts = logits.shape
    scores = torch.sigmoid(logits.float())
    biased = (scores + bias.float()).view(tokens, n_group, experts // n_group)
    groups = top_k_stable(biased.topk(2, dim=-1).values.sum(dim=-1), topk_group)
    out = torch.ones(tokens, n_group, dtype=torch.bool, device=logits.device)
    out.scatter_(1, groups, False)
    biased = biased.masked_fill(out.unsqueeze(-1), float("-inf")).view(tokens, experts)
    ids = top_k_stable(biased, top_k)
    return ExpertChoice(ids, normalised_weights(scores, ids, scaling))


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit), elementwise in the inputs' dtype."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
