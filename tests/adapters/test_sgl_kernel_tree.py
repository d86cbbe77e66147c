"""Draft trees of the `sgl_kernel` stand-in against `draft_trees`, which walks single nodes."""

from __future__ import annotations

import random

import pytest
import torch
from draft_trees import DraftTree, random_expansion, random_tree, stacked_links
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.srt.sgl_kernel_torch import tree

FULL, QLEN_ONLY = 0, 1


def built(
    expansions: list[object], seq_lens: list[int], topk: int, depth: int, nodes: int, mode: int
) -> dict[str, torch.Tensor]:
    batch = len(expansions)
    cells = sum((length + nodes) * nodes for length in seq_lens)
    out = {
        "mask": torch.ones(cells if mode == FULL else batch * nodes * nodes, dtype=torch.bool),
        "positions": torch.full((batch * nodes,), -99),
        "index": torch.full((batch, nodes), -1),
        "next_token": torch.full((batch, nodes), -1),
        "next_sibling": torch.full((batch, nodes), -1),
    }
    width = len(expansions[0].parent_list)  # type: ignore[attr-defined]
    parents = torch.tensor([e.parent_list for e in expansions], dtype=torch.int64)  # type: ignore[attr-defined]
    selected = torch.tensor([e.selected for e in expansions], dtype=torch.int64)  # type: ignore[attr-defined]
    tree.build_tree_kernel_efficient_cpu(
        parents.view(batch, width),
        selected.view(batch, nodes - 1),
        torch.tensor(seq_lens),
        *out.values(),
        topk,
        depth,
        nodes,
        mode,
    )
    return out


@pytest.mark.parametrize("mode", [FULL, QLEN_ONLY])
@given(
    seed=st.integers(0, 10_000),
    topk=st.integers(1, 4),
    depth=st.integers(1, 5),
    batch=st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_build_tree(mode: int, seed: int, topk: int, depth: int, batch: int) -> None:
    rng = random.Random(seed)
    candidates = topk + (depth - 1) * topk * topk
    nodes = 1 + rng.randint(1, min(candidates, 11))
    expansions = [random_expansion(rng, topk, depth, nodes) for _ in range(batch)]
    seq_lens = [rng.randint(0, 9) for _ in range(batch)]
    out = built(list(expansions), seq_lens, topk, depth, nodes, mode)

    index, next_token, next_sibling = stacked_links([e.tree for e in expansions])
    assert torch.equal(out["index"], index)
    assert torch.equal(out["next_token"], next_token)
    assert torch.equal(out["next_sibling"], next_sibling)
    positions, pieces = [], []
    for expansion, length in zip(expansions, seq_lens, strict=True):
        positions += [length + expansion.tree.level(node) for node in range(nodes)]
        mask = expansion.tree.mask()
        if mode == FULL:
            mask = torch.cat([torch.ones(nodes, length, dtype=torch.bool), mask], dim=1)
        pieces.append(mask.flatten())
    assert out["positions"].tolist() == positions
    assert torch.equal(out["mask"], torch.cat(pieces))


def test_node_whose_parent_was_not_kept_hangs_nowhere() -> None:
    # Candidate 3 belongs to beam 1, which is candidate 0; only candidates 1 and 3 were kept.
    out = {name: torch.full((1, 3), -1) for name in ("index", "next_token", "next_sibling")}
    mask, positions = torch.zeros(9, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    tree.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]),
        torch.tensor([[1, 3]]),
        torch.tensor([4]),
        mask,
        positions,
        *out.values(),
        2,
        2,
        3,
        QLEN_ONLY,
    )
    assert out["next_token"].tolist() == [[1, -1, -1]]
    assert out["next_sibling"].tolist() == [[-1, -1, -1]]
    assert mask.view(3, 3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, False, True],
    ]


def test_bit_packed_mask_is_refused() -> None:
    empty = torch.empty(1, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"tree_mask_mode: expected 0 .* found 2"):
        tree.build_tree_kernel_efficient_cpu(*([empty] * 8), 1, 1, 2, 2)


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 13), batch=st.integers(0, 4))
@settings(deadline=None, max_examples=60)
def test_reconstruct_from_mask_recovers_the_tree(seed: int, nodes: int, batch: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, nodes) for _ in range(batch)]
    seq_lens = [rng.randint(1, 50) for _ in range(batch)]
    masks = [t.mask().flatten() for t in trees]
    out = [torch.full((batch * nodes,), -99) for _ in range(4)]
    tree.reconstruct_indices_from_tree_mask(
        torch.cat(masks) if masks else torch.empty(0, dtype=torch.bool),
        torch.tensor(seq_lens, dtype=torch.int64),
        *out,
        batch,
        nodes,
    )
    positions = [
        n + t.level(i) for t, n in zip(trees, seq_lens, strict=True) for i in range(t.nodes)
    ]
    assert out[0].tolist() == positions
    for flat, wanted in zip(out[1:], stacked_links(trees) if trees else [], strict=False):
        assert torch.equal(flat.view(batch, nodes), wanted)


def test_reconstruct_links_padding_nodes_of_a_short_draft_to_nothing() -> None:
    # A chain of two real nodes, then padding that attends to itself only.
    mask = DraftTree((-1, 0)).mask()
    padded = torch.eye(4, dtype=torch.bool)
    padded[:2, :2] = mask
    out = [torch.full((4,), -99) for _ in range(4)]
    tree.reconstruct_indices_from_tree_mask(padded.flatten(), torch.tensor([6]), *out, 1, 4)
    assert out[0].tolist() == [6, 7, 6, 6]
    assert out[2].tolist() == [1, -1, -1, -1]
    assert out[3].tolist() == [-1, -1, -1, -1]
