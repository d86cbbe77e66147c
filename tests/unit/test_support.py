"""The support matrix, its document and its tests say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.core.support import (
    ALGORITHMS_OF,
    COVERED,
    DENSE,
    LAYOUTS,
    MODELS,
    NONE,
    UNTRIED,
    WORKLOADS,
    layout,
    verdict,
)
from sglang_ext.core.support_table import with_tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_document_holds_the_tables() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text) == text, "run python -m sglang_ext.core.support_table docs/layouts.md"


def test_names_are_unique_and_found() -> None:
    names = [one.name for one in LAYOUTS]
    assert len(set(names)) == len(names)
    assert all(layout(name).name == name for name in names)
    with pytest.raises(KeyError, match="tp2"):
        layout("tp3")


def test_every_cell_has_a_verdict_and_refusals_have_reasons() -> None:
    for one in LAYOUTS:
        for model in MODELS:
            for algorithm in ALGORITHMS_OF[model]:
                for workload in WORKLOADS:
                    found = verdict(one, model, algorithm, workload)
                    assert found.yes is (found.reason == "")
        assert all(verdict(one, model, NONE, "short").yes for model in one.models), one.name
        assert not set(one.models) & {model for model, _ in one.refused}, one.name


def test_only_layouts_of_experts_are_untried_and_on_the_dense_model_alone() -> None:
    for one in LAYOUTS:
        untried = [m for m in MODELS if verdict(one, m, NONE, "short").reason == UNTRIED]
        spread = {"--ep-size", "--moe-a2a-backend"} & set(one.flags)
        assert untried == ([DENSE] if spread else []), one.name


def test_what_the_short_run_covers_runs() -> None:
    for name, model, algorithm in COVERED:
        assert verdict(layout(name), model, algorithm, "short").yes
    assert len(set(COVERED)) == len(COVERED)
    assert {name for name, _, _ in COVERED} == {one.name for one in LAYOUTS}


def test_sizes_are_read_from_the_flags() -> None:
    one = layout("tp4 dp2 cp2 ep4 deepep")
    assert (one.ranks, one.attention_dp, one.size("--attn-cp-size")) == (4, 2, 2)
    assert layout("pp2 dp2").ranks == 4
    assert layout("dp2 replicas").ranks == layout("dp2 replicas").dp_ranks == 2
