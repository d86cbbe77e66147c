"""Turns a selection of draft tokens, or a tree mask, into the linked tree that verify walks.

A draft tree of n nodes per request is stored as three arrays [batch, n]: `retrive_index`, the row
of each node in the flat batch; `retrive_next_token`, the first child; `retrive_next_sibling`, the
next node with the same parent; -1 where there is none. Node 0 is the root, the last committed
token. Children are linked in ascending order of their node number.
"""

from __future__ import annotations

import torch

FULL_MASK = 0
QLEN_ONLY = 1
ROOT = 0
NOWHERE = -1


def _parents_of_selected(
    parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int
) -> torch.Tensor:
    """Parent node of every node but the root.

    Args:
        parent_list: [batch, topk * (depth - 1) + 1] candidate number of each expanded beam.
        selected_index: [batch, n - 1] candidate numbers kept, ascending; candidate c was expanded
            from beam `c // topk`, and beam 0 is the root.

    Returns:
        [batch, n - 1] int64; -1 where the parent was not kept.
    """
    beam = selected_index // topk
    from_root = beam == 0
    if parent_list.shape[1] == 0:
        return torch.where(from_root, ROOT, NOWHERE)
    parent_candidate = parent_list.gather(1, beam.long())
    same = selected_index.unsqueeze(1) == parent_candidate.unsqueeze(2)
    node = torch.where(same.any(2), same.int().argmax(2) + 1, NOWHERE)
    return torch.where(from_root, ROOT, node)


def _link_children(
    parents: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor
) -> None:
    """Writes the child and sibling links of a tree given by its parents.

    Args:
        parents: [batch, n] int64, -1 for the root and for a node that hangs nowhere.
        next_token, next_sibling: [batch, n], written in place.
    """
    nodes = parents.shape[1]
    number = torch.arange(nodes, device=parents.device)
    none = nodes
    is_child = parents.unsqueeze(1) == number.view(1, nodes, 1)
    first_child = torch.where(is_child, number, none).amin(2)
    linked = (parents != NOWHERE).unsqueeze(2)
    same_parent = (parents.unsqueeze(2) == parents.unsqueeze(1)) & linked
    later = same_parent & (number.view(1, 1, nodes) > number.view(1, nodes, 1))
    sibling = torch.where(later, number, none).amin(2)
    next_token.copy_(torch.where(first_child == none, NOWHERE, first_child))
    next_sibling.copy_(torch.where(sibling == none, NOWHERE, sibling))


def _ancestor_mask(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which nodes each node attends to, itself and the root included, and how deep it lies.

    Args:
        parents: [batch, n] int64.
        depth: levels below the root; a walk never takes more steps.

    Returns:
        mask [batch, n, n] bool, level [batch, n] int64.
    """
    batch, nodes = parents.shape
    current = torch.arange(nodes, device=parents.device).expand(batch, nodes).clone()
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    mask[:, :, ROOT] = True
    level = torch.zeros_like(current)
    for _ in range(depth):
        below_root = current > ROOT
        level += below_root
        # A walk that has ended points at the root, which every node attends to anyway.
        current.clamp_(min=ROOT)
        mask.scatter_(2, current.unsqueeze(2), True)
        current = torch.where(below_root, parents.gather(1, current), ROOT)
    return mask, level


def _full_mask_columns(seq_lens: torch.Tensor, nodes: int) -> torch.Tensor:
    """Position of the tree block's cells in the ragged mask [sum of nodes x (seq + nodes)].

    Returns:
        [batch, nodes, nodes] int64.
    """
    width = seq_lens + nodes
    request_start = (width * nodes).cumsum(0) - width * nodes
    number = torch.arange(nodes, device=seq_lens.device)
    row_start = request_start.unsqueeze(1) + width.unsqueeze(1) * number + seq_lens.unsqueeze(1)
    return row_start.unsqueeze(2) + number


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Builds mask, positions and links of the EAGLE draft tree, in place.

    Args:
        parent_list: [batch, topk * (depth - 1) + 1] int, or [batch, 0] when depth is 1.
        selected_index: [batch, draft_token_num - 1] int.
        verified_seq_len: [batch] int, committed tokens.
        tree_mask: bool; [batch * n * n] in mode 1, [sum of n * (seq_len + n)] in mode 0, of which
            only the n x n block of each request is written.
        positions: [batch * n] int, position of every node in its text.
        retrive_index, retrive_next_token, retrive_next_sibling: [batch, n] int.
        tree_mask_mode: 0 with the prefix columns, 1 without.

    Raises:
        NotImplementedError: another mask mode.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            "build_tree_kernel_efficient_cpu: tree_mask_mode: expected 0 (full) or 1 (without the "
            f"prefix), found {tree_mask_mode}; bit-packed masks need a CUDA device"
        )
    batch, nodes = selected_index.shape[0], draft_token_num
    below = _parents_of_selected(parent_list, selected_index, topk)
    parents = torch.cat([below.new_full((batch, 1), NOWHERE), below], dim=1)
    seq_lens = verified_seq_len.long()
    mask, level = _ancestor_mask(parents, depth)
    if tree_mask_mode == FULL_MASK:
        tree_mask.view(-1)[_full_mask_columns(seq_lens, nodes)] = mask
    else:
        tree_mask.view(batch, nodes, nodes).copy_(mask)
    positions.view(batch, nodes).copy_(level + seq_lens.unsqueeze(1))
    _number_nodes(retrive_index, batch, nodes)
    _link_children(parents, retrive_next_token, retrive_next_sibling)


def _number_nodes(retrive_index: torch.Tensor, batch: int, nodes: int) -> None:
    flat = torch.arange(batch * nodes, device=retrive_index.device)
    retrive_index.view(batch, nodes).copy_(flat.view(batch, nodes))


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recovers positions and links from a tree mask, in place (n-gram drafts come as masks).

    Args:
        tree_mask: [batch * n * n] bool, cell (i, j) set when node i attends to node j.
        verified_seq_len: [batch] int.
        positions, retrive_index, retrive_next_token, retrive_next_sibling: [batch * n] or
            [batch, n] int.
    """
    batch, nodes = batch_size, draft_token_num
    number = torch.arange(nodes, device=tree_mask.device)
    ancestors = tree_mask.view(batch, nodes, nodes) & (number < number.unsqueeze(1))
    level = ancestors.sum(2)
    parents = torch.where(ancestors, number, NOWHERE).amax(2)
    positions.view(batch, nodes).copy_(level + verified_seq_len.long().unsqueeze(1))
    _number_nodes(retrive_index, batch, nodes)
    _link_children(
        parents, retrive_next_token.view(batch, nodes), retrive_next_sibling.view(batch, nodes)
    )
