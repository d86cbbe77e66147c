"""Ranks and groups equal those that SGLang's own code makes, for every layout up to 64 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.entrypoints import engine
from sglang.srt.runtime_context import (
    derive_attention_ranks,
    derive_parallel_widths,
    derive_spawn_ranks,
)

from sglang_ext.core.layout import Kind, ParallelLayout, legal_layouts

_GLOBALS = ("_TP", "_DCP", "_ATTN_CP", "_ATTN_TP", "_SHARED_EXPERTS_TP", "_MOE_DP", "_MOE_EP",
            "_MOE_TP", "_PP", "_SELF_PP")  # fmt: skip
_KINDS: dict[str, Kind] = {
    "tp_group": "tp",
    "pp_group": "pp",
    "attn_tp_group": "attn_tp",
    "attn_cp_group": "attn_cp",
    "moe_dp_group": "moe_dp",
    "moe_ep_group": "moe_ep",
    "moe_tp_group": "moe_tp",
}


class _Recorded(SimpleNamespace):
    """Stands for a process group: keeps the ranks it was asked to join."""

    rank_in_group = 1
    pynccl_comm = None


class _Context(SimpleNamespace):
    """Stands for SGLang's parallel context: gives sizes, takes the groups that were built."""

    def override_permanently(self, **values: Any) -> None:
        self.built = values


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    world = SimpleNamespace(local_rank=0, device_group=None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "gloo")
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(
        parallel_state,
        "init_model_parallel_group",
        lambda ranks, *_, **__: _Recorded(groups=ranks),
    )

    def groups_of(layout: ParallelLayout) -> dict[str, list[tuple[int, ...]]]:
        context = _Context(
            tp_size=layout.tp,
            pp_size=layout.pp,
            attn_dp_size=layout.dp,
            attn_cp_size=layout.cp,
            moe_ep_size=layout.ep,
            moe_dp_size=layout.moe_dp,
            attn_dcp_size=1,
            shared_experts_tp_size=None,
        )
        for name in _GLOBALS:
            monkeypatch.setattr(parallel_state, name, None)
        monkeypatch.setattr(parallel_state, "get_parallel", lambda: context)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: layout.world)
        parallel_state.initialize_model_parallel()
        return {name: [tuple(g) for g in made.groups] for name, made in context.built.items()}

    yield groups_of
    for name in _GLOBALS:
        assert name in vars(parallel_state)


def test_groups_of_every_layout_up_to_64_ranks(build: Any) -> None:
    count = 0
    for world in range(1, 65):
        for layout in legal_layouts(world):
            theirs = build(layout)
            assert set(theirs) == set(_KINDS)
            for name, kind in _KINDS.items():
                assert sorted(theirs[name]) == sorted(layout.groups(kind)), (layout, kind)
            count += 1
    assert count > 3000


def _their_ranks(layout: ParallelLayout, rank: int) -> dict[str, int]:
    widths = derive_parallel_widths(
        tp_size=layout.tp,
        attn_cp_size=layout.cp,
        attn_dp_size=layout.dp,
        moe_ep_size=layout.ep,
        moe_dp_size=layout.moe_dp,
        dcp_size=1,
        dcp_enabled=False,
    )
    assert (widths["attn_tp_size"], widths["moe_tp_size"]) == (layout.attn_tp, layout.moe_tp)
    ranks = derive_spawn_ranks(
        world_rank=rank,
        tp_size=layout.tp,
        ep_join_rank_offset=0,
        attn_cp_size=layout.cp,
        attn_tp_size=layout.attn_tp,
        moe_dp_size=layout.moe_dp,
        moe_ep_size=layout.ep,
    )
    attn_tp, attn_dp = derive_attention_ranks(
        tp_rank=ranks["tp_rank"], attn_tp_size=layout.attn_tp, attn_cp_size=layout.cp
    )
    return {**ranks, "attn_tp_rank": attn_tp, "attn_dp_rank": attn_dp}


@pytest.mark.parametrize("world", [1, 6, 12, 16, 24, 64])
def test_ranks_of_every_layout(world: int) -> None:
    for layout in legal_layouts(world):
        for rank in range(0, world, max(world // 8, 1)):
            at = layout.coordinates(rank)
            theirs = _their_ranks(layout, rank)
            assert theirs == {name: getattr(at, name.removesuffix("_rank")) for name in theirs}


@pytest.mark.parametrize("nnodes", [1, 2, 3, 4, 8])
def test_nodes_hold_the_ranks_that_sglang_starts_on_them(
    nnodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for world in (8, 12, 24, 48):
        for layout in legal_layouts(world, nnodes):
            context = SimpleNamespace(nnodes=nnodes, pp_size=layout.pp, tp_size=layout.tp)
            monkeypatch.setattr(engine, "get_parallel", lambda c=context: c)
            nodes = []
            for node in range(nnodes):
                pp_ranks, tp_ranks, *_ = engine._calculate_rank_ranges(node)
                nodes.append(tuple(pp * layout.tp + tp for pp in pp_ranks for tp in tp_ranks))
            assert tuple(nodes) == layout.groups("node"), layout
