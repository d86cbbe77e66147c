"""The planner against published tables, published parameter counts and its own closed forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import Load
from sglang_ext.launcher.compose import compose
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.fields import load_mapping
from sglang_ext.planner import published
from sglang_ext.planner.acceptance import Curve, constant_rate, from_file
from sglang_ext.planner.acceptance import published as published_curve
from sglang_ext.planner.cost import Model
from sglang_ext.planner.draft import draft_of, read_draft
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.memory import largest_that_fits, memory_of
from sglang_ext.planner.picture import draw
from sglang_ext.planner.preset_files import names, question, text
from sglang_ext.planner.search import (
    Question,
    balancing_pays_from,
    best_drafts,
    concurrency_for,
    drafting_loses_beyond,
    overlap_pays_from,
    search,
)
from sglang_ext.planner.shape import read_shape
from sglang_ext.planner.tables import TABLES
from sglang_ext.planner.validate import percentile, validate

runner = CliRunner()


def rows(name: str) -> list[str]:
    return [" ".join(row) for row in TABLES[name]().rows]


def test_mtp_gain_to_the_printed_digit() -> None:
    assert rows("mtp") == [
        "4096 16 2227 1.82x 1.72x 1.50x",
        "4096 64 4716 0.92x 0.82x 0.72x",
        "16384 16 1415 1.80x 1.73x 1.56x",
        "16384 64 2302 1.30x 1.16x 1.01x",
    ]


def test_layer_times_to_the_printed_digit() -> None:
    found = [
        tuple(round(v * 1e6, 2) for v in vars(published.decode_layer(b, t, n)).values())
        for n, b, t in ((4096, 16, 16), (4096, 64, 128), (16384, 16, 32), (16384, 64, 128))
    ]
    assert found == [
        (78.36, 39.40, 55.62),
        (147.65, 51.23, 444.99),
        (147.65, 39.40, 111.25),
        (590.61, 51.23, 444.99),
    ]


def test_break_even_to_the_printed_digit() -> None:
    assert rows("break-even") == [
        "4096 16 1 7.1834 7.3011 1.0164 0.0164",
        "4096 16 2 7.1834 10.4147 1.4498 0.4498",
        "4096 16 3 7.1834 13.9255 1.9386 0.9386",
        "4096 64 1 13.5722 27.3669 2.0164 1.0164 (impossible)",
        "4096 64 2 13.5722 41.1615 3.0328 2.0328 (impossible)",
        "4096 64 3 13.5722 54.9562 4.0492 3.0492 (impossible)",
        "16384 16 1 11.3076 11.5958 1.0255 0.0255",
        "16384 16 2 11.3076 16.2846 1.4401 0.4401",
        "16384 16 3 11.3076 20.9734 1.8548 0.8548",
        "16384 64 1 27.8043 39.6079 1.4245 0.4245",
        "16384 64 2 27.8043 59.6398 2.1450 1.1450",
        "16384 64 3 27.8043 79.6717 2.8654 1.8654",
    ]


def test_dsa_to_the_printed_digit() -> None:
    assert rows("dsa") == [
        "4K 1.14 -> 0.64 1.8x 4.5 -> 2.8 1.6x 0.7 -> 2.5 0.3x",
        "32K 9.13 -> 1.11 8.2x 36.0 -> 6.4 5.6x 44.0 -> 27.5 1.6x",
        "128K 36.51 -> 2.72 13.4x 144.0 -> 18.8 7.7x 703.7 -> 215.5 3.3x",
    ]


def test_schedule_to_the_printed_digit() -> None:
    assert rows("schedule") == [
        "0 1 1 1 1000 1000 start",
        "1 0.95 2 1.95 520 1014 admit",
        "2 0.874 3 2.824 400 1129.6 admit",
        "3 0.7429 4 3.5669 340 1212.746 admit",
        "4 0.22287 5 3.78977 280 1061.1356 reject, stop",
    ]


def test_the_table_is_what_core_schedules() -> None:
    """The printed example agrees with the algorithm that the workers run."""
    from sglang_ext.core.spec.schedule import schedule_prefixes
    from sglang_ext.core.spec.sps import SpsTable

    table = SpsTable(tuple(range(1, 6)), published.SPEEDS, 5)
    survivals = np.cumprod([published.CONFIDENCE], axis=1)
    admitted = [row for row in published.schedule_table() if row.decision == "admit"]
    assert schedule_prefixes(survivals, table) == [len(admitted)]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v3.2", 671e9, 37e9),
        ("deepseek-v4-flash", 284e9, 13e9),
        ("deepseek-v4-pro", 1.6e12, 49e9),
        ("qwen3-8b", 8.19e9, None),
        ("qwen3-32b", 32.8e9, None),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("demo", 134.5e6, None),
    ],
)
def test_parameters_are_as_published(name: str, total: float, active: float | None) -> None:
    shape = read_shape(catalog.model(name).config)
    assert shape.params == pytest.approx(total, rel=0.02)
    if active is not None:
        assert shape.active_params == pytest.approx(active, rel=0.1)


def test_the_v4_flash_draft_weighs_what_its_shards_do() -> None:
    model = catalog.model("deepseek-v4-flash")
    draft = read_draft(model.drafts["dspark"], model.config, read_shape(model.config))
    assert draft.shared + draft.routed == pytest.approx(10.86e9, rel=0.005)


def test_kv_bytes_follow_the_cache_layout() -> None:
    v32 = read_shape(catalog.model("deepseek-v3.2").config)
    assert v32.kv_token == 61 * (1152 + 132)
    qwen = read_shape(catalog.model("qwen3-8b").config)
    assert qwen.kv_token == 36 * 2 * 8 * 128 * 2
    flash = read_shape(catalog.model("deepseek-v4-flash").config)
    assert {k.name: k.count for k in flash.kinds} == {"window": 2, "CSA": 21, "HCA": 20}


def test_memory_of_a_hand_computed_rank() -> None:
    """Qwen3-8B on one GPU: bf16 weights, two requests of 1,000 tokens."""
    shape, machine = read_shape(catalog.model("qwen3-8b").config), catalog.hardware("1xh100")
    memory = memory_of(shape, None, Layout(1, 1), machine, Load(900, 100, 2))
    assert sum(memory.weights.values()) == pytest.approx(2 * shape.params)
    assert sum(memory.kv.values()) == 2 * 1000 * 147456
    split = memory_of(shape, None, Layout(1, 8), catalog.hardware("8xh100"), Load(900, 100, 2))
    assert sum(split.weights.values()) == pytest.approx(shape.params / 4)
    assert sum(split.kv.values()) == 2 * 1000 * 147456 / 8


def test_a_latent_cache_is_not_split_over_tensor_ranks_but_over_groups() -> None:
    shape, machine = read_shape(catalog.model("deepseek-v3.2").config), catalog.hardware("8xh200")
    load = Load(4000, 96, 64)
    tensor = sum(memory_of(shape, None, Layout(1, 8), machine, load).kv.values())
    groups = sum(memory_of(shape, None, Layout(1, 8, dp=8), machine, load).kv.values())
    assert tensor == 64 * 4096 * shape.kv_token
    assert groups == tensor / 8


def test_redundant_experts_take_their_share() -> None:
    shape, machine = read_shape(catalog.model("deepseek-v3.2").config), catalog.hardware("8xh200")
    layout = Layout(1, 8, dp=8, ep=8, a2a="deepep", redundant=32)
    memory = memory_of(shape, None, layout, machine, Load(1000, 100, 8))
    assert memory.weights["redundant experts"] == 58 * 4 * shape.expert_params * shape.expert


def test_a_dense_draft_takes_its_share() -> None:
    """The draft of Qwen3-8B: five layers of the target's sizes, split over 8 ranks; what reads the
    target's features and the Markov tables is whole on each."""
    model, machine = catalog.model("qwen3-8b"), catalog.hardware("8xh200")
    shape, layout = read_shape(model.config), Layout(1, 8, algorithm="dspark", gamma=7)
    load = Load(900, 100, 4)
    with_draft = memory_of(shape, draft_of(model, shape, layout), layout, machine, load)
    without = memory_of(shape, None, layout, machine, load)
    config = model.drafts["dspark"].config
    assert (config["num_hidden_layers"], config["markov_rank"]) == (5, 256)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    taps, markov = 5 * 4096 * 4096, 2 * 151936 * 256
    assert with_draft.weights["draft weights"] == 2 * (5 * layer / 8 + taps + markov)
    assert with_draft.kv["draft KV"] == 4 * 1000 * 5 * 2 * 1024 * 2 / 8
    more = with_draft.weights["draft weights"] + with_draft.kv["draft KV"]
    assert with_draft.static - without.static == pytest.approx(more)


def test_a_draft_in_the_checkpoint_takes_its_share() -> None:
    """DeepSeek-V4-Flash's: 10.86 GB on disk, over eight ranks; the last 128 tokens of a request."""
    model, machine = catalog.model("deepseek-v4-flash"), catalog.hardware("8xh200")
    shape, layout = read_shape(model.config), Layout(1, 8, algorithm="dspark", gamma=5)
    draft = draft_of(model, shape, layout)
    load = Load(4000, 96, 8)
    memory = memory_of(shape, draft, layout, machine, load)
    assert draft is not None
    assert draft.shared + draft.routed == pytest.approx(10.86e9, rel=0.005)
    # Of each of three stages the first projections of queries and keys, and what reads features.
    first = 3 * (4096 * (1024 + 512) + 4096 * 4096) * shape.linear + 2 * 129280 * 256 * 2
    assert draft.whole == first
    assert memory.weights["draft weights"] == first + (draft.shared + draft.routed - first) / 8
    assert memory.kv["draft KV"] == 8 * 3 * 128 * 584
    plain = memory_of(shape, None, replace(layout, algorithm=""), machine, load)
    assert "draft weights" not in plain.terms()


def test_the_indexer_takes_its_share() -> None:
    """Per layer of V3.2: 64 heads of 128 out of rank 1536, one key and 64 gates out of 7168."""
    load = Load(4000, 96, 8)
    shape, machine = read_shape(catalog.model("deepseek-v3.2").config), catalog.hardware("8xh200")
    memory = memory_of(shape, None, Layout(1, 8, dp=8), machine, load)
    params = 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    assert memory.weights["indexer weights"] == params * shape.linear
    assert memory.kv["indexer keys"] == 61 * 4096 * 132
    assert memory.kv["KV of MLA with indexer layers"] == 61 * 4096 * 2 * (512 + 64)
    flash = read_shape(catalog.model("deepseek-v4-flash").config)
    kept = memory_of(flash, None, Layout(1, 8, dp=8), machine, load).kv
    # Every fourth token has a key; the inputs of the last ones wait in fp32 to be compressed.
    assert kept["indexer keys"] == 21 * (4096 / 4 * 132 + 16 * 4 * 4 * 128)
    dense = read_shape(catalog.model("qwen3-8b").config)
    assert "indexer keys" not in memory_of(dense, None, Layout(1, 8), machine, load).terms()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["qwen3-8b", "deepseek-v3.2", "deepseek-v4-flash"]),
    st.integers(1, 64),
    st.integers(64, 4000),
)
def test_what_is_said_to_fit_fits_and_one_more_does_not(name: str, many: int, length: int) -> None:
    shape, machine = read_shape(catalog.model(name).config), catalog.hardware("8xh200")
    layout, load = Layout(1, 8), Load(length, 32, many)
    largest = largest_that_fits(shape, None, layout, machine, load)
    assert memory_of(
        shape, None, layout, machine, replace(load, concurrency=largest.concurrency)
    ).fits
    if largest.concurrency < 65536:
        more = replace(load, concurrency=largest.concurrency + 1)
        assert not memory_of(shape, None, layout, machine, more).fits


@given(st.floats(1.0, 7.9), st.integers(7, 15))
def test_a_constant_rate_gives_back_the_accepted_length(tau: float, gamma: int) -> None:
    rate = constant_rate(tau, gamma)
    assert Curve((rate,) * gamma, "derived", "").advance(gamma) == pytest.approx(tau, abs=1e-9)


def test_published_acceptance_is_marked_by_whose_it_is() -> None:
    own = published_curve("qwen3-8b", "dspark", "gsm8k", 7)
    assert own.advance(7) == pytest.approx(6.17)
    assert own.basis == "derived"
    assert published_curve("deepseek-v4-flash", "dspark", "math", 5).basis == "assumed"


def test_the_built_in_drafts_acceptance_is_the_readmes() -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    said = re.search(r"held-out acceptance length ([\d.]+) \(([^)]*)\)", page)
    assert said is not None
    sets = {"all": said[1]} | dict(part.split(" ") for part in said[2].split(", "))
    for task, tau in sets.items():
        found = published_curve("demo", "dspark", task, 7)
        assert found.advance(7) == pytest.approx(float(tau))
    dflash = re.search(r"The DFLASH draft is older: [\d,]+ tokens, ([\d.]+)\.", page)
    assert dflash is not None
    assert published_curve("demo", "dflash", "chat", 7).advance(7) == pytest.approx(
        float(dflash[1])
    )


def _cost(layout: Layout, name: str = "deepseek-v3.2", hardware: str = "8xh200") -> Model:
    model = catalog.model(name)
    shape = read_shape(model.config)
    draft = None
    if layout.algorithm:
        draft = read_draft(model.drafts[layout.algorithm], model.config, shape)
    return Model(shape, draft, layout, catalog.hardware(hardware))


def test_one_qwen3_8b_gpu_reads_its_weights_each_step() -> None:
    """A third-party vLLM run on one H100 took 6.78 ms per token at batch 1."""
    found = _cost(Layout(1, 1), "qwen3-8b", "1xh100").round(1, 0, 1024).total
    assert found == pytest.approx(6.78e-3, rel=0.15)


@given(st.integers(1, 256), st.integers(0, 5), st.integers(1, 100_000))
def test_more_rows_or_context_never_take_less_time(b: int, k: int, n: int) -> None:
    cost = _cost(Layout(1, 8, dp=8))
    now = cost.round(b, k, n).total
    assert cost.round(b + 1, k, n).total >= now
    assert cost.round(b, k + 1, n).total >= now
    assert cost.round(b, k, n + 1000).total >= now


def test_verify_budget_is_the_best_of_all_and_shrinks_with_load() -> None:
    cost = _cost(Layout(1, 8, algorithm="dspark", gamma=5), "deepseek-v4-flash")
    curve = Curve((0.8,) * 5, "assumed", "")
    found = [best_drafts(cost, curve, b, 4096) for b in (1, 64, 512, 2048)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0
    speeds = [curve.advance(k) / cost.round(64, k, 4096).total for k in range(6)]
    assert found[1] == speeds.index(max(speeds))


def test_drafting_and_overlap_limits_are_where_the_sign_changes() -> None:
    question = Question(
        catalog.model("deepseek-v4-flash"), catalog.hardware("8xh200"), Load(4096, 1024, 64)
    )
    plan = next(p for p in search(question).ranked if p.layout.algorithm)
    limit = drafting_loses_beyond(plan, 4096)
    assert limit is not None
    assert best_drafts(plan.cost, plan.curve, limit, 4096) > 0
    assert best_drafts(plan.cost, plan.curve, limit + 1, 4096) == 0
    deepep = replace(plan, layout=Layout(1, 8, dp=8, ep=8, a2a="deepep"), curve=None, drafts=0)
    deepep = replace(deepep, cost=_cost(deepep.layout))
    start = overlap_pays_from(deepep, 4096)
    if start is not None and start > 2:
        before = deepep.cost.round(start - 1, 0, 4096, tbo=True).total
        assert before >= deepep.cost.round(start - 1, 0, 4096, tbo=False).total


def test_limits_put_layouts_that_miss_them_last() -> None:
    question = Question(
        catalog.model("qwen3-32b"), catalog.hardware("8xh100"), Load(4096, 1024, 32), tpot=0.010
    )
    ranked = search(question).ranked
    missed = [bool(plan.misses) for plan in ranked]
    assert missed == sorted(missed)
    assert any(missed)
    assert not missed[0]


def test_limits_that_nothing_meets_are_refused_with_what_does(tmp_path: Path) -> None:
    words = ["plan", "--model", "qwen3-8b", "--hardware", "8xh100", "--tpot", "1.2"]
    preset = tmp_path / "p.yaml"
    result = runner.invoke(app, [*words, "--preset", str(preset)])
    assert result.exit_code == 2
    assert not preset.exists()
    said = re.search(
        r"--tpot: .* 32 at a time, found 'TPOT 1.2 ms'. Nearest: `(.+)` with TPOT ([\d.]+) ms "
        r"\(assumed\). At 14 requests at a time `.+` with TPOT ([\d.]+) ms \(assumed\) meets "
        r"them.",
        result.output,
    )
    assert said, result.output
    assert float(said[3]) <= 1.2 < float(said[2])
    met = runner.invoke(app, [*words, "--concurrency", "14", "--preset", str(preset)])
    assert met.exit_code == 0, met.output
    assert runner.invoke(app, [*words, "--concurrency", "15"]).exit_code == 2
    assert "TPOT up to 1.2 ms" in yaml.safe_load(preset.read_text())["source"]
    none = runner.invoke(app, [*words[:-1], "0.01", "--ttft", "1"])
    assert none.exit_code == 2
    assert "--ttft, --tpot" in none.output
    assert "Not even one request at a time" in none.output
    rate = runner.invoke(app, [*words, "--rate", "1e6"])
    said = re.search(r"--rate: expected at most [1-9].* per second \((\w+)\), ", rate.output)
    assert said, rate.output
    assert said[1] in BASES
    kept = runner.invoke(app, [*words[:-2], "--rate", "1"])
    assert re.search(r"^\d+ at a time for 1 a second \(assumed\)$", kept.output, re.M), kept.output


PLAN = ("plan", "--model", "deepseek-v4-flash", "--hardware", "8xh200", "--concurrency", "128")


def _v32(machine: str, concurrency: int = 64) -> Question:
    load = Load(4096, 1024, concurrency)
    return Question(catalog.model("deepseek-v3.2"), catalog.hardware(machine), load)


def test_a_pipeline_stage_holds_its_share_of_the_layers() -> None:
    question = _v32("2x8xh100")
    shape = read_shape(question.model.config)
    whole = memory_of(shape, None, Layout(1, 8), question.hardware, question.load)
    stage = memory_of(shape, None, Layout(1, 8, pp=2), question.hardware, question.load)
    assert shape.layers == 61
    for name in ("routed experts", "attention weights"):
        assert stage.weights[name] == pytest.approx(whole.weights[name] * 31 / 61)
    head = "embedding and head"
    assert stage.weights[head] == whole.weights[head] / 2
    assert sum(stage.kv.values()) == pytest.approx(sum(whole.kv.values()) * 31 / 61)


def test_stages_and_overlap_and_balancing_are_searched_where_they_can_be() -> None:
    answer = search(_v32("2x8xh100"))
    names = [plan.layout.name for plan in answer.ranked]
    assert "tp8 pp2" in names
    assert any("eplb-r32" in name for name in names)
    blackwell = search(_v32("8xb200"))
    assert any(plan.layout.sbo for plan in blackwell.ranked)
    # SGLang does not start it on Hopper.
    assert not any(plan.layout.sbo for plan in answer.ranked)
    drafting = search(replace(_v32("2x8xh100"), model=catalog.model("deepseek-v4-flash")))
    found = [plan.layout for plan in drafting.ranked]
    assert any(layout.pp > 1 for layout in found)
    assert not any(layout.algorithm and layout.pp > 1 for layout in found)


def test_a_round_of_a_pipeline_passes_every_stage() -> None:
    question = _v32("2x8xh100")
    shape = read_shape(question.model.config)
    two = Model(shape, None, Layout(1, 8, pp=2), question.hardware)
    one = Model(shape, None, Layout(1, 8), question.hardware)
    piped, half = two.round(64, 0, 4096.0), one.round(32, 0, 4096.0)
    # 61 layers in two stages: each as slow as the one with 31.
    assert piped.attention == pytest.approx(half.attention * 62 / 61)
    assert piped.communication > half.communication
    assert piped.host == 2 * half.host


def test_balancing_leads_from_the_imbalance_that_is_said() -> None:
    load, context = Load(512, 256, 8192), 640.0
    question = replace(_v32("4x8xh200"), load=load)
    best = search(question).ranked[0]
    start = balancing_pays_from(best, context)
    assert best.layout.a2a == "deepep"
    assert start is not None
    for skew, better in ((start + 0.02, True), (start - 0.02, False)):
        given = replace(best.cost, assumptions=replace(best.cost.assumptions, imbalance=skew))
        eplb = replace(given, layout=replace(best.layout, redundant=32))
        times = [m.round(best.requests, 0, context).total for m in (eplb, given)]
        assert (times[0] < times[1]) is better
    few = replace(question, load=replace(load, concurrency=64))
    plan = next(p for p in search(few).ranked if p.layout.a2a == "deepep")
    # Experts are read, not computed: how rows are shared out changes nothing.
    assert balancing_pays_from(plan, context) is None
    command = "--model deepseek-v3.2 --hardware 4x8xh200 --input-tokens 512 --output-tokens 256"
    words = [*command.split(), "--concurrency", "8192", "--explain"]
    assert f"from which EPLB pays: {start:,.4g} x the mean" in run_plan(*words)
    skewed = json.loads(run_plan(*words, "--imbalance", f"{start + 1}", "--json"))
    assert any("eplb-r32" in plan["layout"] for plan in skewed["ranked"])
    assert skewed["assumptions"]["imbalance"]["value"] == start + 1


BASES = {"measured", "derived", "assumed"}


def run_plan(*words: str) -> str:
    result = runner.invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_number_of_a_plan_says_where_it_comes_from() -> None:
    shown = json.loads(runner.invoke(app, [*PLAN, "--json"]).output)
    assert shown["ranked"]
    for plan in shown["ranked"]:
        for number in plan["numbers"].values():
            assert number["basis"] in BASES
        assert {plan[f"{name}_basis"] for name in ("memory", "round", "drafts")} <= BASES
    assert shown["verify_budget_basis"] in BASES
    assert {given["basis"] for given in shown["assumptions"].values()} <= BASES
    assert {rival["basis"] for rival in shown["rivals"]} <= BASES
    assert shown["verify_budget"]["1"] >= shown["verify_budget"]["512"]
    text = runner.invoke(app, [*PLAN, "--explain"]).output
    number_lines = re.findall(r"^  \S.*: .*$", text.split("memory per rank, GiB")[0], re.M)
    assert number_lines
    assert all(re.search(r"\((measured|derived|assumed)\)$", line) for line in number_lines)
    assert text.count("loses by") == 2
    assert "measure time of" in text


@pytest.mark.parametrize(
    ("words", "loses"),
    [
        ((), r"[\d.]+% of throughput"),
        (
            ("--objective", "long-context", "--input-tokens", "36000"),
            r"[\d.]+% of a request's speed",
        ),
        (("--ttft", "{between}"), r"TTFT [\d.]+ ms > [\d.]+ ms"),
    ],
)
def test_a_rival_loses_by_what_plans_are_ranked_by(words: tuple[str, ...], loses: str) -> None:
    """Never by a negative share: it may have more throughput and be ranked below."""
    command = ("--model", "qwen3-32b", "--hardware", "8xh100")
    shown = json.loads(run_plan(*command, "--json", "--top", "99"))["ranked"]
    times = sorted({plan["numbers"]["ttft"]["value"] for plan in shown})
    limit = f"{(times[0] + times[1]) / 2:.3f}"
    given = [word.format(between=limit) for word in words]
    said = re.findall(
        r"^loses by (.*) \(assumed\): ", run_plan(*command, *given, "--explain"), re.M
    )
    assert len(said) == 2
    assert all(re.fullmatch(loses, line) for line in said), said


def test_a_plan_becomes_a_preset_that_launch_takes(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert runner.invoke(app, [*PLAN, "--preset", str(path)]).exit_code == 0
    shown = runner.invoke(app, ["launch", str(path), "--dry-run", "--json"])
    assert shown.exit_code == 0
    assert "--speculative-algorithm" in json.loads(shown.output)["argv"]


def test_a_plan_of_a_local_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog.model("qwen3-8b").config))
    preset = tmp_path / "p.yaml"
    words = ["plan", "--model", f"./{tmp_path.name}", "--hardware", "h100", "--gpus", "2"]
    with monkeypatch.context() as moved:
        moved.chdir(tmp_path.parent)
        result = runner.invoke(app, [*words, "--preset", str(preset)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(preset.read_text())["model"] == str(tmp_path)
    shown = runner.invoke(app, ["launch", str(preset), "--dry-run"])
    assert str(tmp_path) in shown.output


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("--table mtp", "--preset p.yaml"),
        ("--table mtp", "--model demo"),
        ("--table mtp", "--validate x"),
        ("--table mtp", "--input-tokens 4096"),
        ("--validate x", "--input-tokens 1"),
        ("--model qwen3-8b --hardware 8xh100 --rate 1", "--concurrency 2"),
        ("--model qwen3-32b --hardware 8xh100", "--task code"),
        ("--model qwen3-32b --hardware 8xh100", "--acceptance x"),
        ("--model qwen3-32b --hardware 8xh100", "--imbalance 2"),
    ],
)
def test_an_option_that_would_be_passed_over_is_refused(
    first: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["plan", *first.split(), *other.split()])
    assert result.exit_code == 2
    assert f"{other.split()[0]}: expected none" in result.output
    assert not list(tmp_path.iterdir())


def test_a_picture_shows_every_rank_with_its_experts(tmp_path: Path) -> None:
    question = Question(
        catalog.model("deepseek-v3.2"), catalog.hardware("2x8xh100"), Load(4096, 512, 64)
    )
    answer = search(question)
    plan = next(p for p in answer.ranked if p.layout.ep == 16)
    svg = draw(answer, plan)
    ET.fromstring(svg)
    words = re.findall(r">([^<]+)</text>", svg)
    assert [w for w in words if w.startswith("rank ")] == [f"rank {r}" for r in range(16)]
    assert [w for w in words if w.startswith("node ")] == ["node 0", "node 1"]
    assert "experts 240 to 255" in words
    staged = next(p for p in answer.ranked if p.layout.pp == 2)
    words = re.findall(r">([^<]+)</text>", draw(answer, staged))
    held = [w for w in words if w.startswith("layers ")]
    assert held == ["layers 0 to 29"] * 8 + ["layers 30 to 60"] * 8


def _result(tokens: float, **layout: int | str) -> str:
    return json.dumps(
        {
            "model": "deepseek-v3.2", "hardware": "8xh200", "layout": layout,
            "load": {"input_tokens": 4096, "output_tokens": 1024, "concurrency": 128},
            "throughput": tokens,
        }
    )  # fmt: skip


def _with_rates(rate: float, **layout: int | str) -> str:
    point = json.loads(_result(1.0, replicas=1, tp=8, **layout))
    return json.dumps(point | {"model": "qwen3-8b", "conditional": [rate]})


def test_validation_of_perfect_and_of_inverted_results(tmp_path: Path) -> None:
    model, machine = catalog.model("deepseek-v3.2"), catalog.hardware("8xh200")
    plans = search(Question(model, machine, Load(4096, 1024, 128))).ranked
    one = next(p for p in plans if p.layout == Layout(1, 8, dp=4))
    two = next(p for p in plans if p.layout == Layout(1, 8, dp=8))
    sizes = ({"replicas": 1, "tp": 8, "dp": 4}, {"replicas": 1, "tp": 8, "dp": 8})
    path = tmp_path / "bench.jsonl"
    assert one.throughput != two.throughput
    path.write_text(f"{_result(one.throughput, **sizes[0])}\n{_result(two.throughput, **sizes[1])}")
    found = validate(path)
    assert [(r.points, r.median) for r in found.regions] == [(2, 0.0)]
    assert (found.pairs, found.ranked_right) == (1, 1)
    path.write_text(
        f"{_result(two.throughput, **sizes[0])}\n\n{_result(one.throughput, **sizes[1])}"
    )
    assert validate(path).ranked_right == 0
    half = one.throughput / 2
    path.write_text(_result(half, **sizes[0]))
    assert validate(path).regions[0].p90 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "line"),
        ("[]", "line"),
        (_result(1.0, tp=8), "replicas"),
        (_result(1.0, replicas=1, tp=8, sp=2), "sp"),
        (_result(1.0, replicas=1, tp=8, dp="4"), "dp: expected a whole number"),
        (_result(1.0, replicas=1, tp=8, dp=0), "dp: expected a whole number"),
        (_result(1.0, replicas=1, tp=8, pp=0), "pp: expected a whole number"),
        (_result(1.0, replicas=1, tp=8, dp=3), "dp . cp divides tp"),
        (_result(1.0, replicas=1, tp=8, ep=3), "divides tp"),
        (_result(1.0, replicas=2, tp=8), "at most the 8 ranks"),
        (_result(1.0, replicas=1, tp=8, pp=2), "at most the 8 ranks"),
        (_result(1.0, replicas=1, tp=8, tbo="no"), "tbo: expected true or false"),
        (_result(1.0, replicas=1, tp=8, a2a="x"), "a2a: expected one of none, deepep"),
        (_result(1.0, replicas=1, tp=8, algorithm="dspark", gamma=3), "algorithm: expected none"),
        (_with_rates(0.5, algorithm="eagle", gamma=3), "algorithm: expected one of dspark"),
        (_with_rates(0.5, algorithm="dspark"), "gamma: expected"),
        (_result(1.0, replicas=1, tp=8, gamma=3), "gamma: expected an `algorithm`"),
        (_with_rates(2.0, algorithm="dspark", gamma=5), "conditional: expected probabilities"),
        (_with_rates(0.5), "conditional: expected an algorithm"),
        (_result(0.0, replicas=1, tp=8), "throughput"),
        (_result(1.0, replicas=1, tp=8).replace("8xh200", "8xh201"), "GPU"),
        ("", "file"),
    ],
)
def test_a_damaged_bench_file_is_refused_by_line_and_field(
    tmp_path: Path, line: str, field: str
) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=field):
        validate(path)
    assert runner.invoke(app, ["plan", "--validate", str(path)]).exit_code == 2


@pytest.mark.parametrize(
    "text", ["conditional: []", "conditional: [1.2]", "conditional: 3", "rates: [0.5]", "x: ["]
)
def test_a_damaged_acceptance_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "acceptance.yaml"
    path.write_text(text)
    assert runner.invoke(app, [*PLAN, "--acceptance", str(path)]).exit_code == 2


def test_an_acceptance_file_may_hold_a_curve_per_task(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    own = {"math": [0.9, 0.8], "chat": [0.5]}
    path.write_text(json.dumps({"conditional": own, "source": "ours"}))
    for task, rates in own.items():
        curve = from_file(path, task)
        assert (curve.conditional, curve.basis) == (tuple(rates), "measured")
        assert curve.source == f"ours, {task}"
    for words, said in (("--task code", "expected one of math, chat"), ("", "found 'nothing'")):
        result = runner.invoke(app, [*PLAN, "--acceptance", str(path), *words.split()])
        assert result.exit_code == 2
        assert f"--task: {said}" in result.output or said in result.output
    path.write_text(json.dumps({"conditional": [0.9]}))
    assert from_file(path, None).conditional == (0.9,)
    result = runner.invoke(app, [*PLAN, "--acceptance", str(path), "--task", "math"])
    assert result.exit_code == 2
    assert "--task: expected none, since" in result.output


def test_a_cpu_is_not_told_to_use_more_gpus() -> None:
    words = "plan --model deepseek-v3.2 --hardware cpu"
    result = runner.invoke(app, words.split())
    assert result.exit_code == 2
    assert "GPUs" not in result.output


@pytest.mark.parametrize("name", TABLES)
def test_a_tables_json_says_where_its_numbers_come_from(name: str) -> None:
    rows = json.loads(runner.invoke(app, ["plan", "--table", name, "--json"]).output)
    assert rows
    assert {row["basis"] for row in rows} <= BASES


def test_percentile_is_nearest_rank() -> None:
    assert percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
    assert percentile([3.0], 0.9) == 3.0


@pytest.mark.parametrize("name", catalog.names("presets"))
def test_every_preset_fits_in_memory(name: str) -> None:
    preset = catalog.preset(name)
    launch = compose(preset)
    shape = read_shape(launch.model.config)
    assert preset.load is not None
    flags = launch.effective()
    algorithm = str(flags.get("speculative-algorithm", "")).lower()
    draft = launch.model.drafts.get(algorithm)
    layout = Layout(
        replicas=launch.whole("dp-size"), tp=launch.whole("tp-size"),
        dp=launch.whole("attn-dp-size"), cp=launch.whole("attn-cp-size"),
        ep=launch.whole("ep-size"), pp=launch.whole("pp-size"),
        a2a=str(flags.get("moe-a2a-backend", "none")),
        algorithm=algorithm, gamma=draft.gamma if draft else 0,
    )  # fmt: skip
    sizes = read_draft(draft, launch.model.config, shape) if draft else None
    memory = memory_of(shape, sizes, layout, launch.hardware, preset.load)
    assert memory.fits
    if "mem-fraction-static" in flags:
        fraction = float(flags["mem-fraction-static"])
        assert memory.smallest_fraction <= fraction <= memory.largest_fraction


def test_presets_are_what_the_planner_writes_today() -> None:
    """A sample: `python -m sglang_ext.planner.preset_files` writes all of them again."""
    for model, machine, point in [asked for i, asked in enumerate(names()) if i % 13 == 0]:
        name = f"{model}-{machine}-{point}"
        path, reason = catalog.ROOT / "presets" / f"{name}.yaml", ""
        try:
            expected = text(model, machine, point)
        except ConfigError as error:
            reason = error.remedy.replace("POINT", point)
        assert path.exists() != bool(reason), name
        assert reason or path.read_text() == expected, name
        assert not reason or catalog.why_absent(name) == reason, name


def test_every_model_machine_and_point_has_a_preset_or_a_reason() -> None:
    presets = set(catalog.names("presets"))
    reasons = load_mapping(catalog.ROOT / "absent.yaml")
    for model, machine, point in names():
        stem, name = f"{model}-{machine}", f"{model}-{machine}-{point}"
        assert (name in presets) != (name in reasons or stem in reasons), name
        assert "POINT" not in catalog.why_absent(name)
    asked = {(model, machine) for model, machine, _ in names()}
    assert {f"{model}-{machine}" for model, machine in asked} >= {
        re.sub(rf"-({'|'.join(catalog.POINTS)})$", "", name) for name in reasons
    }


def test_a_load_that_does_not_fit_is_cut_and_the_preset_says_so() -> None:
    presets = map(catalog.preset, catalog.names("presets"))
    cut = [preset for preset in presets if "do not fit" in preset.source]
    assert {preset.point for preset in cut} == {"balanced", "max-throughput"}
    for preset in cut:
        asked, load = question(preset.model, preset.hardware, preset.point), preset.load
        assert load is not None
        assert 8 <= load.concurrency < asked.load.concurrency
        assert load.concurrency % 8 == 0
        assert f"; {asked.load.concurrency} at a time do not fit" in preset.source
        with pytest.raises(ConfigError, match="memory"):
            search(asked)
    names_there = set(catalog.names("presets"))
    for name in names_there:
        if name.endswith("-balanced"):
            assert name.replace("-balanced", "-max-throughput") in names_there


def test_a_memory_share_is_no_larger_than_was_seen_to_work() -> None:
    shares = catalog.model("deepseek-v4-flash").reported.shares
    for gpu, most in shares.items():
        for point in catalog.POINTS:
            preset = catalog.preset(f"deepseek-v4-flash-8x{gpu}-{point}")
            assert preset.flags["mem-fraction-static"] <= most
            assert "sglang#33109" in preset.source


@pytest.mark.parametrize("name", TABLES)
def test_every_table_plots(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "table.svg"
    result = runner.invoke(app, ["plan", "--table", name, "--plot", str(path)])
    assert result.exit_code == 0
    ET.parse(path)


def test_planning_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "from sglang_ext.cli import app\n"
        "app(['plan', '--model', 'qwen3-8b', '--hardware', '8xh100', '--explain'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _asked(model: str, machine: str, load: Load) -> Question:
    return Question(catalog.model(model), catalog.hardware(machine), load)


def test_the_most_requests_that_fit_are_said_exactly() -> None:
    with pytest.raises(ConfigError) as refused:
        search(_asked("qwen3-8b", "8xh100", Load(1, 1, 200_000)))
    (most,) = re.findall(r"of this length (\d+) requests", str(refused.value))
    search(_asked("qwen3-8b", "8xh100", Load(1, 1, int(most))))
    with pytest.raises(ConfigError):
        search(_asked("qwen3-8b", "8xh100", Load(1, 1, int(most) + 1)))


def test_the_fewest_requests_of_a_rate_need_be_no_power_of_two() -> None:
    asked, rate = _asked("deepseek-v3.2", "8xh200", Load(100_000, 1024, 1)), 0.263
    fewest = concurrency_for(asked, rate)
    assert fewest & (fewest - 1)

    def reached(concurrency: int) -> float:
        load = Load(100_000, 1024, concurrency)
        return search(replace(asked, load=load)).ranked[0].throughput / 1024

    assert reached(fewest) >= rate > reached(fewest - 1)
