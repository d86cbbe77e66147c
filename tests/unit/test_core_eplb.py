"""Expert placement: the published example, and properties of every plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.eplb import (
    balanced_packing,
    rebalance_experts,
    redundancy,
    replicate_experts,
)
from sglang_ext.core.eplb_transfer import doubled_on_a_gpu, plan_fetches, spread_copies

relaxed = settings(deadline=None, max_examples=50)

WEIGHT = torch.tensor(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
HIERARCHICAL = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
HIERARCHICAL_SLOTS = [
    [[12, -1], [15, 13], [11, -1], [6, -1], [7, 5], [0, 2],
     [1, -1], [3, -1], [4, -1], [9, -1], [8, 10], [14, -1]],
    [[13, -1], [15, 11], [8, -1], [14, -1], [9, -1], [10, 12],
     [2, 4], [0, -1], [6, 3], [7, -1], [1, -1], [5, -1]],
]  # fmt: skip
HIERARCHICAL_COPIES = [
    [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
    [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
]
HIERARCHICAL_LOAD = [
    [121.5, 86.5, 125.0, 113.0, 147.5, 131.5, 156.0, 152.0],
    [173.0, 179.5, 120.5, 172.0, 123.0, 152.0, 118.5, 117.5],
]
GLOBAL = [
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
]
GLOBAL_SLOTS = [
    [[4, -1], [14, 15], [5, -1], [13, -1], [11, 7], [8, 10],
     [1, -1], [3, -1], [12, -1], [9, -1], [0, 2], [6, -1]],
    [[7, -1], [0, -1], [2, -1], [11, -1], [3, -1], [4, 6],
     [8, 10], [15, 9], [12, 13], [14, -1], [1, -1], [5, -1]],
]  # fmt: skip
GLOBAL_COPIES = [
    [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
    [1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1],
]


def test_the_published_example_hierarchical() -> None:
    got = rebalance_experts(WEIGHT, replicas=16, groups=4, nodes=2, gpus=8)
    assert got.physical_to_logical.tolist() == HIERARCHICAL
    assert got.logical_to_physical.tolist() == HIERARCHICAL_SLOTS
    assert got.copies.tolist() == HIERARCHICAL_COPIES
    assert got.gpu_load(WEIGHT, 8).tolist() == HIERARCHICAL_LOAD
    assert got.imbalance(WEIGHT, 8).tolist() == pytest.approx([1.2081, 1.2422], abs=5e-5)


@pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (3, 2)])
def test_the_published_example_global(groups: int, nodes: int) -> None:
    got = rebalance_experts(WEIGHT, replicas=16, groups=groups, nodes=nodes, gpus=8)
    assert got.physical_to_logical.tolist() == GLOBAL
    assert got.logical_to_physical.tolist() == GLOBAL_SLOTS
    assert got.copies.tolist() == GLOBAL_COPIES
    assert got.imbalance(WEIGHT, 8).tolist() == pytest.approx([1.0726, 1.1903], abs=5e-5)


@given(st.integers(1, 512), st.integers(1, 64))
def test_redundancy_is_the_least_that_divides(experts: int, ranks: int) -> None:
    least = next(r for r in range(ranks) if (experts + r) % ranks == 0)
    assert redundancy(experts, ranks) == least


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int, int]:
    """(weight, replicas, groups, nodes, gpus), loads skewed and at times zero."""
    nodes = draw(st.sampled_from([1, 2]))
    gpus = nodes * draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 2))
    experts = groups * draw(st.integers(1, 4))
    extra = draw(st.integers(0, 2)) * gpus
    replicas = experts + redundancy(experts, gpus) + extra
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    weight = torch.rand(2, experts, generator=generator).pow(4).mul(100).floor()
    return weight, replicas, groups, nodes, gpus


@relaxed
@given(problems())
def test_a_placement_is_consistent(problem: tuple[torch.Tensor, int, int, int, int]) -> None:
    weight, replicas, groups, nodes, gpus = problem
    got = rebalance_experts(weight, replicas, groups, nodes, gpus)
    experts = weight.shape[1]
    for layer in range(len(weight)):
        slots = got.physical_to_logical[layer].tolist()
        assert len(slots) == replicas
        for expert in range(experts):
            held = sorted(s for s in got.logical_to_physical[layer, expert].tolist() if s >= 0)
            assert held == [s for s, e in enumerate(slots) if e == expert]
            assert len(held) == got.copies[layer, expert] >= 1
        if groups % nodes == 0:
            homes: dict[int, set[int]] = {}
            for slot, expert in enumerate(slots):
                homes.setdefault(expert // (experts // groups), set()).add(
                    slot // (replicas // nodes)
                )
            assert all(len(home) == 1 for home in homes.values())
    total = got.gpu_load(weight, gpus).sum(dim=1)
    torch.testing.assert_close(total, weight.sum(dim=1))
    assert (got.imbalance(weight, gpus) >= 1 - 1e-5).all()


@relaxed
@given(problems())
def test_no_expert_twice_on_a_gpu_where_it_can_be_avoided(
    problem: tuple[torch.Tensor, int, int, int, int],
) -> None:
    weight, replicas, groups, nodes, gpus = problem
    placed = rebalance_experts(weight, replicas, groups, nodes, gpus)
    load = weight / placed.copies
    before = placed.physical_to_logical
    after = spread_copies(before, load, gpus, nodes)
    per_node = replicas // nodes
    shape = (len(weight), nodes, per_node)
    assert torch.equal(before.view(shape).sort().values, after.view(shape).sort().values)
    doubled = doubled_on_a_gpu(after, gpus)
    assert (doubled <= doubled_on_a_gpu(before, gpus)).all()
    # Copies fit on distinct GPUs of a node exactly when no expert has more copies than GPUs there.
    for layer in range(len(weight)):
        for node, slots in enumerate(after[layer].view(nodes, per_node).tolist()):
            if max(map(slots.count, slots)) <= gpus // nodes:
                part = after[layer].view(nodes, per_node)[node][None]
                assert doubled_on_a_gpu(part, gpus // nodes).item() == 0


def test_thirty_two_redundant_experts_on_thirty_two_gpus() -> None:
    weight = torch.rand(4, 256, generator=torch.Generator().manual_seed(1)).pow(8) * 1000
    placed = rebalance_experts(weight, 288, 8, 4, 32)
    spread = spread_copies(placed.physical_to_logical, weight / placed.copies, 32, 4)
    assert doubled_on_a_gpu(spread, 32).tolist() == [0] * 4


@relaxed
@given(problems(), st.integers(0, 99))
def test_fetches_turn_the_old_placement_into_the_new(
    problem: tuple[torch.Tensor, int, int, int, int], shift: int
) -> None:
    weight, replicas, groups, nodes, gpus = problem
    old = rebalance_experts(weight, replicas, groups, nodes, gpus).physical_to_logical
    new = rebalance_experts(
        weight.roll(shift, 1), replicas, groups, nodes, gpus
    ).physical_to_logical
    plan = plan_fetches(old, new, gpus, gpus_per_node=gpus // nodes)
    result, per_gpu = old.clone(), replicas // gpus
    for fetch in plan:
        assert old[fetch.layer, fetch.source_slot] == fetch.expert != old[fetch.layer, fetch.slot]
        assert fetch.gpu == fetch.slot // per_gpu
        assert fetch.source_gpu == fetch.source_slot // per_gpu
        mine = old[fetch.layer].view(gpus, per_gpu)[fetch.gpu]
        assert (fetch.source_gpu == fetch.gpu) == bool((mine == fetch.expert).any())
        result[fetch.layer, fetch.slot] = fetch.expert
    assert torch.equal(result, new)
    assert plan_fetches(old, old, gpus) == []


def test_a_lost_expert_cannot_be_fetched() -> None:
    with pytest.raises(ValueError, match="expert 2"):
        plan_fetches(torch.tensor([[0, 1]]), torch.tensor([[0, 2]]), gpus=2)


def test_packing_by_hand() -> None:
    pack, rank = balanced_packing(torch.tensor([[5.0, 1.0, 4.0, 2.0]]), 2)
    assert pack.tolist() == [[0, 0, 1, 1]]
    assert rank.tolist() == [[0, 1, 0, 1]]
    pack, rank = balanced_packing(torch.tensor([[3.0, 9.0]]), 2)
    assert pack.tolist() == [[0, 1]]
    assert rank.tolist() == [[0, 0]]


def test_replication_by_hand() -> None:
    logical, rank, copies = replicate_experts(torch.tensor([[9.0, 4.0, 1.0]]), 6)
    # 9, 4, 1 -> 4.5, 4, 1 -> 3, 4, 1 -> 3, 2, 1
    assert logical.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert rank.tolist() == [[0, 0, 0, 1, 2, 1]]
    assert copies.tolist() == [[3, 2, 1]]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((15, 4, 2, 8), "gpus"),
        ((8, 4, 2, 8), "physical"),
        ((16, 5, 1, 8), "groups"),
        ((15, 4, 2, 5), "nodes"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    arguments: tuple[int, int, int, int], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        rebalance_experts(WEIGHT, *arguments)
