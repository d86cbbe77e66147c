"""Walks draft trees and keeps the path that the target agrees with.

The tree arrays are described in `tree`. All walks advance the whole batch one level at a time.
"""

from __future__ import annotations

import torch

NOWHERE = -1


def _find_sibling(
    first: torch.Tensor,
    wanted: torch.Tensor,
    candidates: torch.Tensor,
    next_sibling: torch.Tensor,
) -> torch.Tensor:
    """The first node of a sibling chain that holds the wanted token.

    Args:
        first: [batch] int64, head of the chain or -1.
        wanted: [batch] token.
        candidates, next_sibling: [batch, n].

    Returns:
        [batch] int64, -1 where no sibling holds it.
    """
    current = first
    while True:
        here = current.clamp(min=0).unsqueeze(1)
        differs = (current != NOWHERE) & (candidates.gather(1, here).squeeze(1) != wanted)
        if not bool(differs.any()):
            return current
        current = torch.where(differs, next_sibling.gather(1, here).squeeze(1).long(), current)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accepts, level by level, the child whose token is the target's choice, in place.

    Args:
        predicts: [batch * n] int32; the target's token is written at each node of the path.
        accept_index: [batch, levels] int32, filled with -1 by the caller; rows of the path.
        accept_token_num: [batch] int32, accepted drafts, the bonus token not counted.
        candidates: [batch, n] int, draft tokens; node 0 is the last committed token.
        retrive_index, retrive_next_token, retrive_next_sibling: [batch, n] int.
        target_predict: [batch, n] int, the target's choice after each node.
    """
    batch, levels = accept_index.shape
    node = torch.zeros(batch, dtype=torch.int64, device=candidates.device)
    accepted = torch.zeros_like(node)
    choices = target_predict.reshape(-1)
    row = retrive_index[:, 0].long()
    accept_index[:, 0] = row
    request = torch.arange(batch, device=candidates.device)
    for _ in range(1, levels):
        children = retrive_next_token.gather(1, node.unsqueeze(1)).squeeze(1).long()
        child = _find_sibling(children, choices[row], candidates, retrive_next_sibling)
        live = torch.nonzero(child != NOWHERE).squeeze(1)
        if live.numel() == 0:
            break
        predicts[row[live]] = choices[row[live]].to(predicts.dtype)
        # A request that found no child keeps its node, so every later level fails the same way.
        accepted[live] += 1
        row[live] = retrive_index[request[live], child[live]].long()
        accept_index[request[live], accepted[live]] = row[live].to(accept_index.dtype)
        node[live] = child[live]
    accept_token_num.copy_(accepted)
    predicts[row] = choices[row].to(predicts.dtype)
