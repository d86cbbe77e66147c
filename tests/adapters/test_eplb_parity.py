"""A live rebalance places experts by SGLang's algorithm: the one that core/eplb.py writes down."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.eplb.eplb_algorithms import compute_algorithm
from sglang.srt.eplb.eplb_algorithms import rebalance_experts as placed_live

from sglang_ext.core.eplb import rebalance_experts, redundancy

# experts, groups, nodes, gpus, redundant beyond what divides; the last two cannot keep groups on
# nodes, so the global policy decides.
SIZES = [
    (8, 1, 1, 2, 2),
    (16, 4, 1, 4, 4),
    (16, 4, 2, 4, 8),
    (64, 8, 4, 16, 16),
    (256, 8, 4, 32, 32),
    (6, 2, 1, 4, 0),
    (12, 3, 2, 4, 4),
    (10, 5, 4, 8, 8),
]


@pytest.mark.parametrize(("experts", "groups", "nodes", "gpus", "more"), SIZES)
def test_the_live_placement_is_ours(
    experts: int, groups: int, nodes: int, gpus: int, more: int
) -> None:
    replicas = experts + redundancy(experts, gpus) + more
    generator = torch.Generator().manual_seed(experts + gpus)
    # Loads without ties: the order of equal ones is each sort's own.
    samples = torch.rand(5, 3, experts, generator=generator).pow(6) * 1000
    live = placed_live(
        samples,
        replicas,
        replicas // gpus,
        groups,
        nodes,
        compute_algorithm("auto", groups, nodes),
    )
    ours = rebalance_experts(samples.sum(dim=0), replicas, groups, nodes, gpus)
    slots, where, copies = (part.cpu() for part in live)
    assert torch.equal(copies, ours.copies)
    assert torch.equal(slots, ours.physical_to_logical)
    width = ours.logical_to_physical.shape[2]
    assert torch.equal(where[..., :width].sort().values, ours.logical_to_physical.sort().values)
