"""K/V of CPU ranks: sized by what the server has loaded, whatever others take meanwhile."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.utils import common

from sglang_ext.srt import kv_budget
from sglang_ext.srt.kv_budget import Holding, budget, free_before, held
from tests.adapters.model_world import model_world
from tests.tiny import make_target

MIB = 1 << 20


def _ranks(count: int, loaded: float, free: float, node: int = 0) -> list[Holding]:
    return [Holding(node, loaded, free) for _ in range(count)]


@given(st.floats(0.05, 0.95), st.floats(1, 64), st.integers(1, 8), st.floats(0, 0.9))
def test_alone_on_the_machine_it_is_sglangs_sum(
    fraction: float, before: float, ranks: int, share: float
) -> None:
    loaded = share * before
    free = before - loaded
    allowed = budget(fraction, before, _ranks(ranks, loaded / ranks, free), 1)
    assert allowed == pytest.approx(min(free - (1 - fraction) * before, free / ranks), abs=1e-9)


def test_what_others_take_is_not_weights() -> None:
    """Four ranks with a tenth each; a neighbour takes 8 of 20 GiB while they load."""
    assert 12 - (1 - 0.1) * 20 < 0, "SGLang's sum leaves nothing"
    assert budget(0.1, 20, _ranks(4, 0.05, 12), 1) == pytest.approx(1.8)


def test_ranks_share_what_is_left() -> None:
    assert budget(0.1, 20, _ranks(4, 0.05, 2), 1) == pytest.approx(0.5)
    assert budget(0.1, 20, _ranks(4, 0.05, 2), 2) == pytest.approx(0.25), "two replicas"
    assert budget(0.1, 20, [*_ranks(2, 0.5, 12), *_ranks(2, 0.5, 1, node=1)], 1) == 0.5


@pytest.mark.parametrize(("parts", "before", "loaded"), [(2, 256.0, 70.0), (6, 256.0, 115.0)])
def test_a_rank_per_numa_node_has_sglangs_sum(parts: int, before: float, loaded: float) -> None:
    """SGLang gives each its part of the free memory; a rank counts for 1/parts of its load."""
    free = before - loaded
    ranks = [Holding(0, loaded / parts, free, parts) for _ in range(parts)]
    assert budget(0.85, before, ranks, 1) == pytest.approx(free - (1 - 0.85) * before)


def test_weights_beyond_the_fraction_leave_none() -> None:
    assert budget(0.3, 20, _ranks(2, 4, 12), 1) == pytest.approx(-2)


@pytest.mark.parametrize(("free", "allowed"), [(12.0, 4.75), (3.0, 3.0)])
def test_sglangs_sum_with_our_baseline(
    monkeypatch: pytest.MonkeyPatch, free: float, allowed: float
) -> None:
    monkeypatch.setattr(common, "get_available_gpu_memory", lambda *_: free)
    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: ["0,1"])
    monkeypatch.setattr(kv_budget, "held", lambda: (1 << 30) // 4)
    kv_budget._before.held = 0
    alone = SimpleNamespace(
        node_rank=0, num_dp_ranks=1, attn_dp_size=1, world_group=SimpleNamespace(world_size=1)
    )
    before = free_before(0.25, 20.0, alone)
    assert free - before * (1 - 0.25) == pytest.approx(allowed)
    with pytest.raises(ValueError, match=r"expected more than 0\.01, .* 0\.25 of the 20\.00 GiB"):
        free_before(0.01, 20.0, alone)


def test_mapped_files_are_not_held(tmp_path: Path) -> None:
    start = held()
    rows = torch.ones(64 * MIB // 4)
    assert 60 * MIB < held() - start < 80 * MIB
    del rows
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * MIB))
    start = held()
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), 4096)) == 0
        assert held() - start < 8 * MIB


def test_a_start_survives_a_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fifths of the machine's free memory are gone when the weights are loaded."""
    free, begin = common.get_free_cpu_memory, kv_budget.begin

    def neighbour() -> None:
        begin()
        monkeypatch.setattr(common, "get_free_cpu_memory", lambda: free() * 3 // 5)

    monkeypatch.setattr(kv_budget, "begin", neighbour)
    target = make_target(tmp_path / "model", "qwen3")
    with model_world(target, "float32", mem_fraction_static=0.1) as world:
        assert world.runner.max_total_num_tokens == 1024
    assert common.get_free_cpu_memory is not free
