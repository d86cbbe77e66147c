"""Native Sparse Attention: which entries, blocks and tokens a query sees.

Source: Native Sparse Attention (Yuan et al., 2025, arXiv 2502.11089), section 3. Three branches
with keys and values of their own, weighted by gates from the query token and added:
    compression   entries, each made of `length` tokens, one every `stride` tokens
    selection     whole blocks of `block` tokens, the best `count` by the compression branch's own
                  attention probabilities, shared by the query heads of one key head
    window        the last `window` tokens

The paper's formula for a block's importance (eq. 9) adds the probabilities of the entries that
overlap it, once for every `stride` tokens they share. With entries and blocks counted from 0 that
is p[block / stride * j + m - n]; the paper writes -m - n, which fits neither count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class NsaSpec:
    """Sizes in tokens; the defaults are the paper's.

    Attributes:
        length: tokens in a compressed entry.
        stride: tokens between the starts of two entries.
        block: tokens in a selection block.
        count: blocks a query selects, the fixed ones included.
        first: leading blocks that are always selected.
        local: blocks up to the query's own that are always selected.
        window: tokens in the sliding window, the query's own included.
    """

    length: int = 32
    stride: int = 16
    block: int = 64
    count: int = 16
    first: int = 1
    local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        for name, size in (("length", self.length), ("block", self.block)):
            if self.stride < 1 or size < self.stride or size % self.stride:
                raise ValueError(
                    f"NsaSpec, {name}: expected a multiple of the stride {self.stride}, "
                    f"found {size}"
                )
        if self.length > self.block:
            raise ValueError(
                f"NsaSpec, length: expected at most the block of {self.block}, found {self.length}"
            )
        if min(self.first, self.local) < 0 or not 0 < self.count >= self.first + self.local:
            raise ValueError(
                f"NsaSpec, count: expected at least first + local = {self.first + self.local} "
                f"and 1, found {self.count}"
            )
        if self.window < 1:
            raise ValueError(f"NsaSpec, window: expected at least 1, found {self.window}")

    def entries(self, tokens: int) -> int:
        """Entries that `tokens` tokens make: those whose last token is among them."""
        return max(0, (tokens - self.length) // self.stride + 1)

    def blocks(self, tokens: int) -> int:
        """Selection blocks that hold `tokens` tokens; the last may be partial."""
        return -(-tokens // self.block)


class NsaKeys(NamedTuple):
    """Keys and values of one sequence.

    Attributes:
        k_entry, v_entry: [entries, key heads, dim], compressed, `spec.entries(tokens)` of them.
        k_block, v_block: [tokens, key heads, dim], of the selection branch.
        k_window, v_window: [tokens, key heads, dim], of the window branch.
    """

    k_entry: Tensor
    v_entry: Tensor
    k_block: Tensor
    v_block: Tensor
    k_window: Tensor
    v_window: Tensor


def entry_windows(x: Tensor, spec: NsaSpec) -> Tensor:
    """The tokens of every entry, a view: x [tokens, heads, dim] -> [entries, length, heads, dim].

    What the learned compression phi reads.
    """
    if x.shape[0] < spec.length:
        return x.new_empty(0, spec.length, *x.shape[1:])
    return x.unfold(0, spec.length, spec.stride).movedim(-1, 1)


def compress_entries(x: Tensor, position: Tensor, weight: Tensor, spec: NsaSpec) -> Tensor:
    """entry[e, g] = sum over i of (x[e * stride + i, g] + position[i, g]) weight[g, i].

    The learned compression phi (section 3.3.1) with a linear layer over the block and an encoding
    of the place inside it; of a deeper network this is the first layer. A mean over the block is
    weight[g, i] = identity / length.

    x [tokens, heads, dim], position [length, heads, dim], weight [heads, length, dim, out dim]
    -> [entries, heads, out dim] in the dtype of x, summed in float32.
    """
    rows = entry_windows(x, spec) + position
    return torch.einsum("elgd,gldo->ego", rows.float(), weight.float()).to(x.dtype)


def visible_entries(positions: Tensor, spec: NsaSpec) -> Tensor:
    """How many entries end at or before each position; [rows] int -> [rows] int."""
    return ((positions + 1 - spec.length) // spec.stride + 1).clamp(min=0)


def entry_probabilities(
    q: Tensor, k_entry: Tensor, positions: Tensor, spec: NsaSpec, scale: float
) -> Tensor:
    """softmax(scale q K^T) over the visible entries, 0 for a query that sees none.

    q [rows, heads, dim], k_entry [entries, key heads, dim], positions [rows]
    -> [rows, key heads, heads / key heads, entries] float32.
    """
    grouped = q.float().unflatten(1, (k_entry.shape[1], -1))
    scores = torch.einsum("tgsd,egd->tgse", grouped, k_entry.float()) * scale
    entry = torch.arange(k_entry.shape[0], device=q.device)
    hidden = entry >= visible_entries(positions, spec).unsqueeze(1)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1).masked_fill(hidden[:, None, None], 0.0)


def block_importance(probabilities: Tensor, blocks: int, spec: NsaSpec) -> Tensor:
    """importance_j = sum over entries of p * (strides the entry shares with block j).

    Args:
        probabilities: [rows, key heads, heads of a key head, entries].
        blocks: how many blocks there are.

    Returns:
        [rows, key heads, blocks] float32, summed over the heads that share a key head.
    """
    per_block, per_entry = spec.block // spec.stride, spec.length // spec.stride
    shared = probabilities.sum(dim=2)
    # pieces[s] = probability of the entries that contain stride s, s = j * per_block + m.
    wanted = blocks * per_block
    pieces = shared.new_zeros(*shared.shape[:2], max(wanted, shared.shape[2] + per_entry - 1))
    for n in range(per_entry):
        pieces[..., n : n + shared.shape[2]] += shared
    return pieces[..., :wanted].unflatten(-1, (blocks, per_block)).sum(dim=-1)


def ranked_blocks(importance: Tensor, positions: Tensor, spec: NsaSpec) -> tuple[Tensor, Tensor]:
    """What decides about each block, and how many leading blocks each query sees.

    The first and the local blocks are above any other; those after the query's own are not seen.

    Args:
        importance: [rows, key heads, blocks].
        positions: [rows] int.

    Returns:
        [rows, key heads, blocks], infinite for the fixed ones, and [rows] int.
    """
    block = torch.arange(importance.shape[-1], device=importance.device)
    own = (positions // spec.block).unsqueeze(1)
    fixed = (block < spec.first) | ((block > own - spec.local) & (block <= own))
    return importance.masked_fill(fixed.unsqueeze(1), float("inf")), own.squeeze(1) + 1


def select_blocks(importance: Tensor, positions: Tensor, spec: NsaSpec) -> Tensor:
    """The blocks each query attends to, by rising number; the lower block wins among equals.

    importance, positions: as `ranked_blocks`.

    Returns:
        [rows, key heads, count] int64, -1 in the places that nothing fills.
    """
    blocks = importance.shape[-1]
    ranked, visible = ranked_blocks(importance, positions, spec)
    visible = visible.view(-1, 1, 1)
    future = torch.arange(blocks, device=importance.device) >= visible
    ranked = ranked.masked_fill(future, float("-inf"))
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., : spec.count]
    chosen = order.masked_fill(order >= visible, blocks).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == blocks, -1)
    return F.pad(chosen, (0, spec.count - chosen.shape[-1]), value=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [rows, heads, dim], k and v [keys, key heads, dim], visible [rows, key heads, keys]."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("tgsd,kgd->tgsk", grouped, k.float()) * scale
    scores = scores.masked_fill(~visible.unsqueeze(2), float("-inf"))
    return torch.einsum("tgsk,kgd->tgsd", torch.softmax(scores, -1), v.float()).flatten(1, 2)


def native_sparse_attention(
    q: Tensor, keys: NsaKeys, gates: Tensor, positions: Tensor, spec: NsaSpec, scale: float
) -> Tensor:
    """sum over the branches of gate * attention of that branch.

    Args:
        q: [rows, heads, dim], queries of one sequence.
        keys: of the same sequence, up to its newest token.
        gates: [rows, heads, 3], for compression, selection and window, already in (0, 1).
        positions: [rows] int, each below the number of tokens.
        spec: the sizes.
        scale: factor on q.k.

    Returns:
        [rows, heads, value dim] in the dtype of q.
    """
    tokens, device = keys.k_block.shape[0], q.device
    probabilities = entry_probabilities(q, keys.k_entry, positions, spec, scale)
    compressed = torch.einsum("tgse,egd->tgsd", probabilities, keys.v_entry.float()).flatten(1, 2)
    importance = block_importance(probabilities, spec.blocks(tokens), spec)
    chosen = select_blocks(importance, positions, spec)
    token = torch.arange(tokens, device=device)
    causal = token <= positions.unsqueeze(1)
    in_block = (token // spec.block == chosen.unsqueeze(-1)).any(dim=2)
    selected = _attend(q, keys.k_block, keys.v_block, in_block & causal.unsqueeze(1), scale)
    near = (causal & (token > positions.unsqueeze(1) - spec.window)).unsqueeze(1)
    near = near.expand(-1, keys.k_window.shape[1], -1)
    window = _attend(q, keys.k_window, keys.v_window, near, scale)
    branches = torch.stack((compressed, selected, window), dim=2)
    return (branches * gates.float().unsqueeze(-1)).sum(dim=2).to(q.dtype)
