"""Expert-parallel load balancing: which physical slot holds which expert, from measured loads.

An expert that receives many tokens gets copies (redundant experts); physical experts are packed on
GPUs so that every GPU has as many slots and as equal a load as a greedy packing allows. With groups
of experts (group-limited routing) a group's experts stay on one node, so that a token's choices
cross few node borders.

Source: the algorithm of deepseek-ai/EPLB and DeepSeek-V3 (2024), section 3.4. Ties go to the
lower index throughout, so a plan is a function of the loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def redundancy(experts: int, ranks: int) -> int:
    """Fewest redundant experts so that all divide over the ranks: (R - E mod R) mod R."""
    return (ranks - experts % ranks) % ranks


@dataclass(frozen=True)
class Placement:
    """Physical experts of L layers; physical slot p lives on GPU p // (P / GPUs).

    physical_to_logical: [L, P] int64, expert in each slot
    logical_to_physical: [L, E, C] int64, slots of each expert, -1 beyond its copies; C most copies
    copies: [L, E] int64, copies of each expert, at least 1
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    copies: Tensor

    def gpu_load(self, weight: Tensor, gpus: int) -> Tensor:
        """weight [L, E], an expert's load split evenly over its copies -> [L, gpus] float32."""
        per_copy = weight.float() / self.copies
        return per_copy.gather(1, self.physical_to_logical).unflatten(1, (gpus, -1)).sum(dim=2)

    def imbalance(self, weight: Tensor, gpus: int) -> Tensor:
        """max / mean GPU load of each layer, [L]; 1 is perfect, and what no load at all counts."""
        load = self.gpu_load(weight, gpus)
        mean = load.mean(dim=1)
        return torch.where(mean > 0, load.amax(dim=1) / mean.clamp(min=1e-30), 1.0)


def balanced_packing(weight: Tensor, packs: int) -> tuple[Tensor, Tensor]:
    """n objects into packs of n / packs each, loads as equal as greedy choice makes them.

    The heaviest object left goes to the lightest pack that has room.

    Args:
        weight: [X, n] float, n % packs == 0; every row is packed by itself.
        packs: number of packs.

    Returns:
        pack [X, n] int64, pack of each object; rank [X, n] int64, its place in the pack.
    """
    rows, n = weight.shape
    _check_divides("packs", packs, "objects", n)
    room = n // packs
    if room == 1:
        pack = torch.arange(n).expand(rows, n).clone()
        return pack, torch.zeros_like(pack)
    pack = torch.empty(rows, n, dtype=torch.int64)
    rank = torch.empty_like(pack)
    order = weight.float().cpu().argsort(dim=1, descending=True, stable=True)
    for row in range(rows):
        loads, used = [0.0] * packs, [0] * packs
        for item in order[row].tolist():
            lightest = min((p for p in range(packs) if used[p] < room), key=loads.__getitem__)
            pack[row, item], rank[row, item] = lightest, used[lightest]
            used[lightest] += 1
            loads[lightest] += float(weight[row, item])
    return pack, rank


def replicate_experts(weight: Tensor, physical: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies for the most loaded experts, one at a time, until `physical` slots are used.

    Each further copy goes to the expert whose copies carry the most load, argmax weight / copies.

    Args:
        weight: [X, n] float.
        physical: slots per row, at least n.

    Returns:
        logical [X, physical] int64, expert of each slot, the first n being 0..n-1;
        rank [X, physical] int64, number of the copy; copies [X, n] int64.
    """
    rows, n = weight.shape
    if physical < n:
        raise ValueError(f"physical: expected at least the {n} experts, found {physical}")
    logical = torch.arange(physical).repeat(rows, 1)
    rank = torch.zeros(rows, physical, dtype=torch.int64)
    copies = torch.ones(rows, n, dtype=torch.int64)
    every, load = torch.arange(rows), weight.float().cpu()
    for slot in range(n, physical):
        chosen = (load / copies).argmax(dim=1)
        logical[:, slot] = chosen
        rank[:, slot] = copies[every, chosen]
        copies[every, chosen] += 1
    return logical, rank, copies


def rebalance_experts(
    weight: Tensor, replicas: int, groups: int, nodes: int, gpus: int
) -> Placement:
    """A placement for measured loads; hierarchical where groups divide over nodes, else global.

    Args:
        weight: [L, E], tokens (or another load) of each expert.
        replicas: P, physical experts, a multiple of gpus and at least E.
        groups: expert groups of the router, 1 without.
        nodes: machines; gpus: GPUs in all, a multiple of nodes.

    Returns:
        Placement of P slots.
    """
    weight = weight.float().cpu()
    _check_divides("gpus", gpus, "replicas", replicas)
    if groups % nodes:
        groups, nodes = 1, 1
    _check_divides("nodes", nodes, "gpus", gpus)
    _check_divides("groups", groups, "experts", weight.shape[1])
    logical, rank, copies = _hierarchical(weight, replicas, groups, nodes, gpus)
    return _placement(logical, rank, copies)


def _hierarchical(
    weight: Tensor, replicas: int, groups: int, nodes: int, gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1-3 of the hierarchical policy; one group on one node is the global policy."""
    layers, experts = weight.shape
    size = experts // groups

    # 1. Groups to nodes. order[l, i]: expert at place i when experts are sorted by node.
    node, place = balanced_packing(weight.unflatten(1, (groups, size)).sum(dim=2), nodes)
    first = (node * (groups // nodes) + place) * size
    position = (first[:, :, None] + torch.arange(size)).flatten(1)
    order = _inverse(position)

    # 2. Copies within each node.
    by_node = weight.gather(1, order).view(layers * nodes, experts // nodes)
    logical, rank, copies = replicate_experts(by_node, replicas // nodes)

    # 3. Physical experts to the GPUs of their node, by the load of one copy.
    load = (by_node / copies).gather(1, logical)
    gpu, place = balanced_packing(load, gpus // nodes)
    slot = _inverse(gpu * (replicas // gpus) + place)

    within = logical.gather(1, slot).view(layers, nodes, -1)
    offset = (torch.arange(nodes) * (experts // nodes))[:, None]
    physical = order.gather(1, (within + offset).flatten(1))
    return (
        physical,
        rank.gather(1, slot).view(layers, -1),
        copies.view(layers, experts).gather(1, position),
    )


def _placement(logical: Tensor, rank: Tensor, copies: Tensor) -> Placement:
    layers, experts = copies.shape
    most = int(copies.max())
    slots = torch.full((layers, experts * most), -1, dtype=torch.int64)
    physical = torch.arange(logical.shape[1]).expand(layers, -1)
    slots.scatter_(1, logical * most + rank, physical)
    return Placement(logical, slots.view(layers, experts, most), copies)


def _inverse(permutation: Tensor) -> Tensor:
    """[X, n], each row a permutation -> its inverse."""
    inverse = torch.empty_like(permutation)
    places = torch.arange(permutation.shape[1]).expand_as(permutation)
    return inverse.scatter_(1, permutation, places)


def _check_divides(name: str, divisor: int, whole_name: str, whole: int) -> None:
    if divisor < 1 or whole % divisor:
        raise ValueError(
            f"{name}: expected a divisor of the {whole} {whole_name}, found {divisor}. "
            "Change the redundant experts or the layout (core.eplb.redundancy)."
        )
