"""From one placement of experts to the next: what to fetch, and copies spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fetch:
    """A slot's new weights: `slot` on `gpu` takes `expert` from `source_slot` on `source_gpu`."""

    layer: int
    slot: int
    gpu: int
    expert: int
    source_slot: int
    source_gpu: int


def plan_fetches(old: Tensor, new: Tensor, gpus: int, gpus_per_node: int = 8) -> list[Fetch]:
    """What every slot whose expert changes must fetch, nothing for the others.

    The source is a slot of the OLD placement: on the same GPU if there is one, else on the same
    node, else anywhere; among equals the GPU that has served fewest fetches of the layer.

    Args:
        old, new: [L, P] int64, expert of each slot.
        gpus: P % gpus == 0.

    Raises:
        ValueError: an expert of `new` that no slot of `old` holds.
    """
    per_gpu = _per_gpu(old.shape[1], gpus)
    plan = []
    for layer, (before, after) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(before):
            holders.setdefault(expert, []).append(slot)
        served = [0] * gpus
        for slot, expert in enumerate(after):
            if before[slot] == expert:
                continue
            if expert not in holders:
                raise ValueError(f"layer {layer}: expected a slot with expert {expert}, found none")
            gpu = slot // per_gpu

            source = min(
                holders[expert], key=partial(_distance, gpu, per_gpu, gpus_per_node, served)
            )
            if source // per_gpu != gpu:
                served[source // per_gpu] += 1
            plan.append(Fetch(layer, slot, gpu, expert, source, source // per_gpu))
    return plan


def _distance(
    gpu: int, per_gpu: int, gpus_per_node: int, served: list[int], slot: int
) -> tuple[bool, bool, int]:
    """Sorts source slots for a GPU: its own first, then its node's, then by fetches served."""
    there = slot // per_gpu
    return there != gpu, there // gpus_per_node != gpu // gpus_per_node, served[there]


def doubled_on_a_gpu(physical_to_logical: Tensor, gpus: int) -> Tensor:
    """[L, P] -> [L] int64, slots that repeat an expert of their own GPU: memory without effect."""
    per_gpu = _per_gpu(physical_to_logical.shape[1], gpus)
    held = physical_to_logical.view(-1, gpus, per_gpu).sort(dim=2).values
    return (held[:, :, 1:] == held[:, :, :-1]).sum(dim=(1, 2))


def spread_copies(physical_to_logical: Tensor, load: Tensor, gpus: int, nodes: int = 1) -> Tensor:
    """The same slots per node, exchanged between GPUs until none holds an expert twice.

    The packing may put two copies of an expert on one GPU (deepseek-ai/EPLB does). A copy is
    exchanged with the slot of another GPU of its node that changes the larger of the two loads
    least and doubles nothing. Where every exchange would double another expert, the slot stays.

    Args:
        physical_to_logical: [L, P] int64.
        load: [L, E], load of ONE copy of each expert.
        gpus, nodes: P % gpus == 0, gpus % nodes == 0.

    Returns:
        [L, P] int64.
    """
    per_gpu = _per_gpu(physical_to_logical.shape[1], gpus)
    layers = []
    for slots, weights in zip(physical_to_logical.tolist(), load.tolist(), strict=True):
        held = [slots[g * per_gpu : (g + 1) * per_gpu] for g in range(gpus)]
        while _exchange_one(held, weights, gpus // nodes):
            pass
        layers.append([expert for gpu in held for expert in gpu])
    return torch.tensor(layers, dtype=torch.int64)


def _exchange_one(held: list[list[int]], load: list[float], per_node: int) -> bool:
    """One exchange that removes a double; False when there is none to make."""
    for gpu, mine in enumerate(held):
        for place, expert in enumerate(mine):
            if mine.count(expert) < 2:
                continue
            first = gpu // per_node * per_node
            options = [
                (_worse_load(mine, theirs, expert, theirs[other], load), there, other)
                for there in range(first, first + per_node)
                for theirs in [held[there]]
                if there != gpu and expert not in theirs
                for other in range(len(theirs))
                if theirs[other] not in mine
            ]
            if options:
                _, there, other = min(options)
                mine[place], held[there][other] = held[there][other], expert
                return True
    return False


def _worse_load(
    mine: list[int], theirs: list[int], out: int, back: int, load: list[float]
) -> float:
    moved = load[back] - load[out]
    return max(sum(load[e] for e in mine) + moved, sum(load[e] for e in theirs) - moved)


def _per_gpu(slots: int, gpus: int) -> int:
    if gpus < 1 or slots % gpus:
        raise ValueError(f"gpus: expected a divisor of the {slots} slots, found {gpus}")
    return slots // gpus
