"""Routing one token at a time with Python's own sort."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang_ext.core.router import ExpertChoice


def _sqrt_softplus(logit: float) -> float:
    """log1p(e^x) = max(x, 0) + log1p(e^-|x|), which cannot overflow."""
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))


def _best(scores: list[float], candidates: list[int], k: int) -> list[int]:
    """The k candidates with the largest score, lower index first among equals."""
    return sorted(candidates, key=lambda i: (-scores[i], i))[:k]


def _float32(values: list[float]) -> list[float]:
    """Rounded as the fast paths round, so that ties are ties here too."""
    rounded: list[float] = torch.tensor(values, dtype=torch.float32).tolist()
    return rounded


def _weights(scores: list[float], chosen: list[int], scaling: float) -> list[float]:
    total = sum(scores[i] for i in chosen) + 1e-20
    return [scores[i] / total * scaling for i in chosen]


def _stack(ids: list[list[int]], weights: list[list[float]], top_k: int) -> ExpertChoice:
    return ExpertChoice(
        torch.tensor(ids, dtype=torch.int64).view(-1, top_k),
        torch.tensor(weights, dtype=torch.float32).view(-1, top_k),
    )


def route_sqrtsoftplus_reference(
    logits: Tensor, bias: Tensor, *, top_k: int, scaling: float
) -> ExpertChoice:
    """Shapes as `api.route_sqrtsoftplus`."""
    ids, weights = [], []
    for row in logits.float().tolist():
        scores = _float32([_sqrt_softplus(x) for x in row])
        biased = (torch.tensor(scores) + bias.float()).tolist()
        ids.append(_best(biased, list(range(len(row))), top_k))
        weights.append(_weights(scores, ids[-1], scaling))
    return _stack(ids, weights, top_k)


def route_hash_reference(
    logits: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scaling: float
) -> ExpertChoice:
    """Shapes as `api.route_hash`."""
    ids, weights = [], []
    for row, token in zip(logits.float().tolist(), token_ids.tolist(), strict=True):
        ids.append(tid2eid[token].tolist())
        weights.append(_weights([_sqrt_softplus(x) for x in row], ids[-1], scaling))
    return _stack(ids, weights, tid2eid.shape[1])


def route_grouped_sigmoid_reference(
    logits: Tensor,
    bias: Tensor,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    scaling: float,
) -> ExpertChoice:
    """Shapes as `api.route_grouped_sigmoid`."""
    size = logits.shape[1] // n_group
    ids, weights = [], []
    for row in logits.float().tolist():
        scores = _float32([_sigmoid(x) for x in row])
        biased = (torch.tensor(scores) + bias.float()).tolist()
        groups = [sorted(biased[g * size : (g + 1) * size])[-2:] for g in range(n_group)]
        kept = _best(_float32([sum(group) for group in groups]), list(range(n_group)), topk_group)
        allowed = [g * size + i for g in sorted(kept) for i in range(size)]
        ids.append(_best(biased, allowed, top_k))
        weights.append(_weights(scores, ids[-1], scaling))
    return _stack(ids, weights, top_k)
