"""Samples a path through a draft tree from the target's distribution.

The law at a node with target distribution p, children c_1, c_2, ... and one coin u in [0, 1):
    c_i is accepted if u < p(c_1) + ... + p(c_i);
    if none is, the next token is drawn from p without those children, renormalised;
    a path that reaches the last level draws its next token from p itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOWHERE = -1


@dataclass(frozen=True)
class _Thresholds:
    single: float
    accumulated: float


@dataclass(frozen=True)
class _Tree:
    """Links and tokens [batch, n] int, coins [batch, n], probabilities [batch, n, vocab]."""

    candidates: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    coins: torch.Tensor
    target_probs: torch.Tensor
    draft_probs: torch.Tensor


def _accept_child(
    tree: _Tree, node: torch.Tensor, walking: torch.Tensor, thresholds: _Thresholds
) -> torch.Tensor:
    """One level: the accepted child of each request's node, -1 where all are refused.

    Refused children take the target's probability in `draft_probs`, which removes them from the
    distribution that the next token is drawn from.

    Args:
        node: [batch] int64.
        walking: [batch] bool, requests that still walk.

    Returns:
        [batch] int64.
    """
    request = torch.arange(node.numel(), device=node.device)
    coin = tree.coins[request, node]
    running = torch.zeros_like(coin)
    taken = torch.full_like(node, NOWHERE)
    child = torch.where(walking, tree.next_token[request, node].long(), NOWHERE)
    while bool((child != NOWHERE).any()):
        asked = torch.nonzero(child != NOWHERE).squeeze(1)
        current = child[asked]
        token = tree.candidates[asked, current].long()
        single = tree.target_probs[asked, node[asked], token]
        running[asked] += single
        # Strictly below: a coin of exactly 0 must not accept a token without probability.
        wins = coin[asked] < running[asked] / thresholds.accumulated
        wins |= single >= thresholds.single
        wins &= single > 0
        taken[asked] = torch.where(wins, current, NOWHERE)
        refused = asked[~wins]
        tree.draft_probs[refused, node[refused], token[~wins]] = single[~wins]
        child[asked] = torch.where(wins, NOWHERE, tree.next_sibling[asked, current].long())
    return taken


def _draw(weights: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
    """Draws from unnormalised weights by inversion, never a column without weight.

    Args:
        weights: [batch, vocab] float, not negative.
        coin: [batch] in [0, 1).

    Returns:
        [batch] int64.
    """
    cumulative = weights.double().cumsum(1)
    total = cumulative[:, -1]
    column = torch.searchsorted(cumulative, (coin * total).unsqueeze(1), right=True).squeeze(1)
    last_with_weight = (cumulative < total.unsqueeze(1)).sum(1)
    return torch.minimum(column, last_with_weight)


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accepts drafts and draws the next token, in place; exact when both thresholds are 1.

    Args:
        predicts: [batch * n] int32; the token chosen after each row of the path.
        accept_index: [batch, levels] int32, filled with -1 by the caller; rows of the path.
        accept_token_num: [batch] int32, accepted drafts, the last token not counted.
        candidates: [batch, n] int, draft tokens; node 0 is the last committed token.
        retrive_index, retrive_next_token, retrive_next_sibling: [batch, n] int.
        uniform_samples: [batch, n] float32 in [0, 1); a node's coin is spent on its children.
        uniform_samples_for_final_sampling: [batch] float32 in [0, 1).
        target_probs: [batch, n, vocab] float32.
        draft_probs: [batch, n, vocab] float32, zeros from the caller; written in place.
        threshold_single: a child at least this probable is accepted whatever the coin.
        threshold_acc: the running sum is divided by this before it meets the coin.
        deterministic: part of the signature; this implementation always is.
    """
    batch, levels = accept_index.shape
    tree = _Tree(
        candidates,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples.view(batch, -1),
        target_probs,
        draft_probs,
    )
    thresholds = _Thresholds(threshold_single, threshold_acc)
    request = torch.arange(batch, device=candidates.device)
    node = torch.zeros_like(request)
    accepted = torch.zeros_like(request)
    walking = torch.ones_like(request, dtype=torch.bool)
    row = retrive_index[:, 0].long()
    accept_index[:, 0] = row
    for level in range(1, levels):
        child = _accept_child(tree, node, walking, thresholds)
        walking &= child != NOWHERE
        live = request[walking]
        predicts[row[live]] = candidates[live, child[live]].to(predicts.dtype)
        node[live] = child[live]
        row[live] = retrive_index[live, child[live]].long()
        accept_index[live, level] = row[live].to(accept_index.dtype)
        accepted += walking
    accept_token_num.copy_(accepted)
    target = target_probs[request, node]
    residual = (target - draft_probs[request, node]).clamp_(min=0)
    weights = torch.where(walking.unsqueeze(1), target, residual)
    drawn = _draw(weights, uniform_samples_for_final_sampling)
    predicts[row] = drawn.to(predicts.dtype)
