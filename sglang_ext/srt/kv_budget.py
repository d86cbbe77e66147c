"""What a rank on a CPU may take for K/V, by what its server has loaded.

    SGLang  free after loading - (1 - fraction) * free before: what other processes took in between
            counts as weights
    here    fraction * free before - loaded, where loaded is what the ranks of a node hold beyond
            what they held before; no more than the rank's share of what is free by then
Both are for each rank: ranks of one NUMA node may be planned more than it has, which is why the
share bounds them. SGLang's function is given the `free before` that makes its sum ours.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

_GIB = 1 << 30


@dataclass
class _Before:
    """Bytes that this process held when its free memory was measured, before it loaded."""

    held: int = 0


_before = _Before()


@dataclass(frozen=True)
class Holding:
    """What a rank tells the others.

    node: its number. loaded, free: GiB, of the NUMA node's part. parts: NUMA nodes of the machine.
    """

    node: int
    loaded: float
    free: float
    parts: int = 1


def held() -> int:
    """Bytes of this process alone: no mapped file, no memory that ranks share."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def begin() -> None:
    """Weights are about to be loaded."""
    _before.held = held()


def budget(fraction: float, before: float, ranks: Sequence[Holding], replicas: int) -> float:
    """GiB of K/V for each of the ranks of all nodes; 0 or less where weights leave none.

    Args:
        fraction: `--mem-fraction-static`.
        before: GiB that were free on the fullest node before anything was loaded.
        ranks: all that speak to each other.
        replicas: how many times the same ranks are on the machine.
    """
    nodes: dict[int, list[Holding]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.node].append(rank)
    room = []
    for here in nodes.values():
        planned = fraction * before - sum(rank.loaded for rank in here)
        free = min(rank.free * rank.parts for rank in here)
        room.append(min(planned, free / (len(here) * replicas)))
    return min(room)


def free_before(fraction: float, before: float, model_parallel: Any) -> float:
    """The GiB `before` of SGLang's sum that give what `budget` allows; every rank calls it.

    model_parallel: SGLang's runtime view of the ranks.

    Raises:
        ValueError: weights leave nothing of the fraction.
    """
    import torch.distributed as dist
    from sglang.srt.utils.common import get_available_gpu_memory, get_cpu_ids_by_node

    gc.collect()
    # SGLang gives each NUMA node its part of what is free.
    parts = len(get_cpu_ids_by_node())
    mine = Holding(
        model_parallel.node_rank,
        max(held() - _before.held, 0) / _GIB / parts,
        get_available_gpu_memory("cpu", 0),
        parts,
    )
    world = model_parallel.world_group
    ranks: list[Any] = [mine] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(ranks, mine, group=world.cpu_group)
    replicas = max(model_parallel.num_dp_ranks // model_parallel.attn_dp_size, 1)
    allowed = budget(fraction, before, ranks, replicas)
    if allowed <= 0:
        taken = fraction * before - allowed
        raise ValueError(
            f"--mem-fraction-static: expected more than {taken / before:.2f}, as the weights take "
            f"{taken:.2f} of the {before:.2f} GiB that were free, found {fraction}. Raise it, or "
            "serve on a machine with more memory."
        )
    if fraction >= 1:
        return before
    return (min(rank.free for rank in ranks) - allowed) / (1 - fraction)
