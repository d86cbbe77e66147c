"""Random draft trees, and what a tree means, written with loops over single nodes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class DraftTree:
    """parents[i] is the parent node of node i, -1 for the root; parents come before children."""

    parents: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    def ancestors(self, node: int) -> list[int]:
        """The node, its parent, ..., the root."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path

    def children(self, node: int) -> list[int]:
        return [child for child in range(self.nodes) if self.parents[child] == node]

    def level(self, node: int) -> int:
        return len(self.ancestors(node)) - 1

    def mask(self) -> torch.Tensor:
        """[n, n] bool."""
        mask = torch.zeros(self.nodes, self.nodes, dtype=torch.bool)
        for node in range(self.nodes):
            for ancestor in self.ancestors(node):
                mask[node, ancestor] = True
        return mask

    def links(self) -> tuple[list[int], list[int]]:
        """First child and next sibling of every node, -1 for none."""
        first, sibling = [-1] * self.nodes, [-1] * self.nodes
        for node in range(self.nodes):
            family = self.children(node)
            if family:
                first[node] = family[0]
            for left, right in pairwise(family):
                sibling[left] = right
        return first, sibling


def random_tree(rng: random.Random, nodes: int) -> DraftTree:
    return DraftTree((-1, *(rng.randrange(node) for node in range(1, nodes))))


def stacked_links(trees: list[DraftTree]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """retrive_index, next_token, next_sibling [batch, n] int64."""
    nodes = trees[0].nodes
    index = torch.arange(len(trees) * nodes).view(len(trees), nodes)
    links = [tree.links() for tree in trees]
    return (
        index,
        torch.tensor([first for first, _ in links]),
        torch.tensor([sibling for _, sibling in links]),
    )


@dataclass(frozen=True)
class Expansion:
    """What EAGLE's draft loop hands over: beams expanded level by level, the best kept.

    Candidate c belongs to beam c // topk. Beam 0 is the root; the beams of a later level are the
    candidates named in `parent_list`, which has one entry per beam.
    """

    parent_list: list[int]
    selected: list[int]
    tree: DraftTree


def random_expansion(rng: random.Random, topk: int, depth: int, nodes: int) -> Expansion:
    """A random run of the draft loop: `depth` levels, `topk` beams, `nodes - 1` candidates kept."""
    parent_list = [-1]
    parent_of: dict[int, int | None] = dict.fromkeys(range(topk))
    level = list(range(topk))
    next_candidate = topk
    for _ in range(depth - 1):
        beams = rng.sample(level, topk)
        parent_list.extend(beams)
        level = []
        for beam in beams:
            for _ in range(topk):
                parent_of[next_candidate] = beam
                level.append(next_candidate)
                next_candidate += 1
    kept: set[int] = set()
    while len(kept) < nodes - 1:
        # Scores fall along a path, so a kept candidate's parent is kept too.
        open_ = [c for c, p in parent_of.items() if c not in kept and (p is None or p in kept)]
        kept.add(rng.choice(open_))
    selected = sorted(kept)
    node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
    parents = [-1]
    for candidate in selected:
        parent = parent_of[candidate]
        parents.append(0 if parent is None else node_of[parent])
    return Expansion(parent_list if depth > 1 else [], selected, DraftTree(tuple(parents)))
