"""A rebalance exports max / mean load over ranks as the loads and placements have it by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from sglang_ext.srt.parallel import expert_load

NAME = "sglang_ext_expert_load_max_over_mean"


def _metadata(physical: list[list[int]], experts: int) -> SimpleNamespace:
    """SGLang's view of a placement over two ranks."""
    logical = torch.full((len(physical), experts, 2), -1)
    copies = torch.zeros(len(physical), experts, dtype=torch.int64)
    for layer, row in enumerate(physical):
        for slot, expert in enumerate(row):
            logical[layer, expert, copies[layer, expert]] = slot
            copies[layer, expert] += 1
    return SimpleNamespace(
        physical_to_logical_map=torch.tensor(physical),
        logical_to_all_physical_map=logical,
        logical_to_all_physical_map_num_valid=copies,
        ep_size=2,
    )


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noted of a layout; the process reports as the first of two ranks."""
    events: list[str] = []
    monkeypatch.setattr(expert_load, "note", events.append)
    monkeypatch.setattr(expert_load.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        expert_load, "get_observability", lambda: SimpleNamespace(enable_metrics=True)
    )
    return events


def test_before_and_after(noted: list[str]) -> None:
    # Two counted steps; layer 0 is dense. Experts 0..3 of layer 1: 6, 2, 2, 2.
    counts = torch.tensor([[[0, 0, 0, 0], [4, 1, 2, 0]], [[0, 0, 0, 0], [2, 1, 0, 2]]])
    before = _metadata([[0, 1, 2, 3, 0, 1]] * 2, 4)  # ranks hold 3 + 1 + 2 and 2 + 3 + 1
    after = _metadata([[0, 1, 2, 0, 3, 3]] * 2, 4)  # 3 + 2 + 2 and 3 + 1 + 1
    expert_load.report(counts, before, after)

    def value(when: str, layer: str = "1") -> float | None:
        return REGISTRY.get_sample_value(NAME, {"layer": layer, "when": when})

    assert value("before") == pytest.approx(1.0)
    assert value("after") == pytest.approx(7 / 6)
    assert value("before", "0") is None
    # Slots change within their rank alone.
    assert not noted


def test_experts_that_cross_ranks_are_noted(noted: list[str]) -> None:
    counts = torch.tensor([[6, 2, 2, 2]])
    before = _metadata([[0, 1, 2, 3, 0, 1]], 4)
    expert_load.report(counts, before, before)
    assert not noted
    # Rank 0 takes expert 3, which rank 1 alone held.
    expert_load.report(counts, before, _metadata([[0, 1, 3, 2, 0, 1]], 4))
    assert noted == ["experts moved between ranks"]
