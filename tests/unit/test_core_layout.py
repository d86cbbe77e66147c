"""Ranks and groups of parallel layouts, and what makes a layout legal."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.layout import (
    KINDS,
    RULES,
    LayoutError,
    ParallelLayout,
    Sizes,
    broken_rules,
    legal_layouts,
    nearest_legal,
)

# Examples are few and cheap; the first call of an operator may take seconds on a busy machine.
relaxed = settings(deadline=None, max_examples=50)

# tp 16, dp 2, cp 4, ep 16, rank by rank: (attn_dp, attn_cp, attn_tp, moe_ep); moe_dp = moe_tp = 0.
EXPECTED = [
    (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 1, 3),
    (0, 2, 0, 4), (0, 2, 1, 5), (0, 3, 0, 6), (0, 3, 1, 7),
    (1, 0, 0, 8), (1, 0, 1, 9), (1, 1, 0, 10), (1, 1, 1, 11),
    (1, 2, 0, 12), (1, 2, 1, 13), (1, 3, 0, 14), (1, 3, 1, 15),
]  # fmt: skip

SIXTEEN = ParallelLayout(tp=16, dp=2, cp=4, ep=16)


def test_the_documented_table_of_sixteen_ranks() -> None:
    lines = [
        f"{rank} attn_dp {dp} attn_cp {cp} attn_tp {tp} moe_dp 0 moe_ep {ep} moe_tp 0"
        for rank, (dp, cp, tp, ep) in enumerate(EXPECTED)
    ]
    assert SIXTEEN.table() == lines


def test_the_documented_groups_of_sixteen_ranks() -> None:
    assert SIXTEEN.groups("attn_tp") == tuple((r, r + 1) for r in range(0, 16, 2))
    assert SIXTEEN.groups("attn_cp") == (
        (0, 2, 4, 6),
        (1, 3, 5, 7),
        (8, 10, 12, 14),
        (9, 11, 13, 15),
    )
    assert SIXTEEN.groups("attn_dp") == tuple((r, r + 8) for r in range(8))
    assert SIXTEEN.groups("moe_ep") == (tuple(range(16)),)
    assert SIXTEEN.groups("moe_tp") == tuple((r,) for r in range(16))
    assert SIXTEEN.groups("moe_dp") == SIXTEEN.groups("attn_cp")


def test_hybrid_of_expert_replicas_and_pipeline() -> None:
    replicas = ParallelLayout(tp=8, cp=2, ep=4, moe_dp=2)
    assert replicas.groups("moe_ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert replicas.groups("moe_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    stages = ParallelLayout(tp=2, pp=3)
    assert stages.groups("tp") == ((0, 1), (2, 3), (4, 5))
    assert stages.groups("pp") == ((0, 2, 4), (1, 3, 5))


def test_nodes_hold_contiguous_ranks() -> None:
    two = ParallelLayout(tp=8, dp=8, ep=8, pp=2, nnodes=4)
    assert two.groups("node") == tuple(tuple(range(n, n + 4)) for n in range(0, 16, 4))
    assert two.crosses_nodes("moe_ep")
    assert not two.crosses_nodes("attn_tp")


@st.composite
def some_legal(draw: st.DrawFn) -> ParallelLayout:
    world = draw(st.integers(1, 64))
    return draw(st.sampled_from(list(legal_layouts(world))))


@relaxed
@given(some_legal())
def test_groups_partition_the_ranks_and_agree_with_the_sizes(layout: ParallelLayout) -> None:
    sizes = {
        "tp": layout.tp,
        "pp": layout.pp,
        "attn_dp": layout.dp,
        "attn_cp": layout.cp,
        "attn_tp": layout.attn_tp,
        "moe_dp": max(layout.cp, layout.moe_dp),
        "moe_ep": layout.ep,
        "moe_tp": layout.moe_tp,
        "node": layout.world,
    }
    for kind in KINDS:
        groups = layout.groups(kind)
        assert sorted(r for g in groups for r in g) == list(range(layout.world))
        assert {len(g) for g in groups} == {sizes[kind]} == {layout.size(kind)}
        assert all(layout.group_of(kind, g[-1]) == g for g in groups)


@relaxed
@given(some_legal())
def test_coordinates_name_one_rank(layout: ParallelLayout) -> None:
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        attention = (at.attn_dp * layout.cp + at.attn_cp) * layout.attn_tp + at.attn_tp
        experts = (at.moe_dp * layout.ep + at.moe_ep) * layout.moe_tp + at.moe_tp
        assert at.pp * layout.tp + attention == rank
        assert attention == experts == at.tp


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=r"0\.\.15"):
        SIXTEEN.coordinates(rank)


@pytest.mark.parametrize(
    ("asked", "rule", "nearest"),
    [
        (Sizes(tp=0), "positive", Sizes()),
        (Sizes(tp=True), "positive", Sizes()),
        (Sizes(tp=6, dp=4), "attention-split", Sizes(tp=6, dp=3)),
        (Sizes(tp=8, dp=4, cp=4), "attention-split", Sizes(tp=8, dp=4, cp=2)),
        (Sizes(tp=8, ep=3), "expert-split", Sizes(tp=8, ep=4)),
        (Sizes(tp=4, ep=8), "expert-split", Sizes(tp=4, ep=4)),
        (
            Sizes(tp=8, cp=2, ep=2, moe_dp=2),
            "expert-replicas-fill",
            Sizes(tp=8, cp=2, ep=4, moe_dp=2),
        ),
        (Sizes(tp=8, moe_dp=2), "expert-replicas-follow-context", Sizes(8, cp=2, moe_dp=2)),
        (Sizes(tp=4, cp=2, pp=2, moe_dp=2), "expert-replicas-one-stage", Sizes(4, cp=2, pp=2)),
        (Sizes(tp=3, pp=4, nnodes=8), "node-split", Sizes(tp=3, pp=4)),
        (Sizes(tp=2, pp=3, nnodes=2), "node-split", Sizes(tp=3, pp=2, nnodes=2)),
        (Sizes(tp=7, nnodes=2), "node-split", Sizes(tp=7)),
    ],
)
def test_an_illegal_layout_names_its_rule_and_the_nearest_legal_one(
    asked: Sizes, rule: str, nearest: Sizes
) -> None:
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(**vars(asked))
    assert rule in [r.name for r in caught.value.rules]
    assert vars(caught.value.nearest) == vars(nearest)
    text = str(caught.value)
    assert str(asked) in text
    assert rule in text
    assert f"--tp-size {nearest.tp} --attn-dp-size {nearest.dp}" in text


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_can_be_broken_alone(rule: object) -> None:
    sizes = product((0, 2, 4, 8), (1, 2), (1, 2), (1, 2, 4, 3), (1, 2), (1, 2), (1, 3))
    assert any(broken_rules(Sizes(*s)) == [rule] for s in sizes)


def test_the_enumeration_is_complete_and_holds_no_layout_twice() -> None:
    wide = range(1, 9)
    for world in (1, 6, 8):
        brute = {
            s
            for s in product(wide, wide, wide, wide, wide, wide, (1,))
            if s[0] * s[4] == world and not broken_rules(Sizes(*s))
        }
        listed = [tuple(vars(layout).values()) for layout in legal_layouts(world)]
        assert len(listed) == len(set(listed))
        assert set(listed) == brute


@relaxed
@given(st.tuples(*[st.integers(1, 8)] * 6, st.integers(1, 3)))
def test_nearest_keeps_the_ranks_and_is_itself_when_legal(sizes: tuple[int, ...]) -> None:
    asked = Sizes(*sizes)
    near = nearest_legal(asked)
    assert near.world == asked.world
    if not broken_rules(asked):
        assert vars(near) == vars(asked)
