"""Native Sparse Attention one query and one head at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.nsa import NsaKeys, NsaSpec


def _probabilities(q: Tensor, k: Tensor, visible: list[int], scale: float) -> Tensor:
    """q [dim], k [keys, dim] -> [len(visible)]"""
    scores = torch.stack([(q.float() * k[i].float()).sum() * scale for i in visible])
    exponentials = torch.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: list[int], scale: float) -> Tensor:
    out = torch.zeros(v.shape[1])
    if visible:
        for p, i in zip(_probabilities(q, k, visible, scale), visible, strict=True):
            out += p * v[i].float()
    return out


def _entries(position: int, entries: int, spec: NsaSpec) -> list[int]:
    """Entries whose last token is not after the position."""
    return [i for i in range(entries) if i * spec.stride + spec.length - 1 <= position]


def _shared_strides(entry: int, block: int, spec: NsaSpec) -> int:
    """How many whole strides of tokens lie both in the entry and in the block."""
    start = max(entry * spec.stride, block * spec.block)
    stop = min(entry * spec.stride + spec.length, (block + 1) * spec.block)
    return max(0, stop - start) // spec.stride


def selected_blocks_reference(
    q: Tensor, k_entry: Tensor, position: int, spec: NsaSpec, scale: float
) -> list[int]:
    """Blocks of one query and one key head; q [heads of the key head, dim], k_entry [n, dim]."""
    own = position // spec.block
    visible = _entries(position, k_entry.shape[0], spec)
    importance = [0.0] * (own + 1)
    for head in q:
        if visible:
            for p, entry in zip(
                _probabilities(head, k_entry, visible, scale), visible, strict=True
            ):
                for block in range(own + 1):
                    importance[block] += float(p) * _shared_strides(entry, block, spec)
    fixed = {b for b in range(own + 1) if b < spec.first or b > own - spec.local}
    others = sorted(set(range(own + 1)) - fixed, key=lambda b: (-importance[b], b))
    return sorted([*fixed, *others][: spec.count])


def native_sparse_attention_reference(
    q: Tensor, keys: NsaKeys, gates: Tensor, positions: Tensor, spec: NsaSpec, scale: float
) -> Tensor:
    """Shapes as `api.native_sparse_attention`; float32."""
    rows, heads, _ = q.shape
    share = heads // keys.k_block.shape[1]
    out = torch.zeros(rows, heads, keys.v_block.shape[2])
    for row in range(rows):
        position = int(positions[row])
        near = list(range(max(0, position - spec.window + 1), position + 1))
        entries = _entries(position, keys.k_entry.shape[0], spec)
        for head in range(heads):
            g = head // share
            of_group = q[row, g * share : (g + 1) * share]
            chosen = selected_blocks_reference(of_group, keys.k_entry[:, g], position, spec, scale)
            tokens = [i for i in range(position + 1) if i // spec.block in chosen]
            branches = (
                _attend(q[row, head], keys.k_entry[:, g], keys.v_entry[:, g], entries, scale),
                _attend(q[row, head], keys.k_block[:, g], keys.v_block[:, g], tokens, scale),
                _attend(q[row, head], keys.k_window[:, g], keys.v_window[:, g], near, scale),
            )
            for gate, branch in zip(gates[row, head].float(), branches, strict=True):
                out[row, head] += gate * branch
    return out
