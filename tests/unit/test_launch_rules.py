"""Each rule of the launcher: a launch that breaks it is refused with the flag to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core.refusals import REFUSALS
from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import Preset
from sglang_ext.launcher.compose import Launch, compose, for_node
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.rules import check, require
from sglang_ext.launcher.rules_experts import fill_redundant


def launch_of(
    model: str, hardware: str, parts: str, env: dict[str, str] | None = None, **flags: Any
) -> Launch:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    preset = Preset("test", model, hardware, "balanced", tuple(parts.split()), named, env or {})
    return compose(preset)


def broken(launch: Launch) -> set[str]:
    return {finding.rule for finding in check(launch) if finding.level == "error"}


V32, V4, QWEN = "deepseek-v3.2", "deepseek-v4-flash", "qwen3-235b-a22b"
LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"

CASES = {
    "layout-is-legal": (V32, "8xh200", "tp8 dp8", {"attn-cp-size": 2, "enable-prefill-cp": True}),
    "replicas-stand-alone": (QWEN, "8xh200", "tp4 replicas2 dp2", {}),
    "every-gpu-has-a-rank": (V32, "2x8xh200", "tp8", {}),
    "heads-divide": ("qwen3-8b", "8xh200", "tp8", {"tp-size": 3}),
    "gpu-can-compute-it": (V32, "8xa100", "tp8", {}),
    "context-parallel-limits": (V4, "8xh200", "tp8 cp8-prefill", {"cp-strategy": "zigzag"}),
    "lm-head-follows-attention": (V32, "8xh200", "tp8", {"enable-dp-lm-head": True}),
    "memory-share-is-a-share": (V32, "8xh200", "tp8", {"mem-fraction-static": 88}),
    "pipeline-limits": (V4, "8xh200", "tp4 dspark", {"pp-size": 2, "max-running-requests": 8}),
    "low-latency-is-for-decode": (V32, "8xh200", "tp8 dp8 ep8 deepep",
                                  {"deepep-mode": "low_latency", "max-running-requests": 64}),
    "dispatch-fits-the-buffer": (V32, "8xh200", "tp8 dp8 ep8 deepep",
                                 {"max-running-requests": 1032}),
    "deepep-can-carry-the-model": (QWEN, "8xh200", "tp8 ep8 deepep", {"max-running-requests": 8}),
    "all-to-all-spans-the-group": (V32, "8xh200", "tp8 ep4 deepep", {"max-running-requests": 8}),
    "experts-divide": (V32, "8xh200", "tp8 ep8", {"ep-num-redundant-experts": 3}),
    "balancing-sees-the-dispatch": (V32, "8xh200", "tp8 ep8 deepep eplb-r32",
                                    {"deepep-mode": "auto", "max-running-requests": 8}),
    "balancing-stays-in-a-stage": (V32, "2x8xh200", "tp8 pp2 ep8", {"enable-eplb": True}),
    "dense-layers-follow-the-head": (V32, "8xh200", "tp8", {"attn-dp-size": 8,
                                                            "moe-dense-tp-size": 1}),
    "running-requests-are-set": (V4, "8xh200", "tp8 dspark", {}),
    "attention-groups-can-draft": (V4, "8xh200", "tp8 dp8 ep8 deepep dspark",
                                   {"max-running-requests": 64}),
    "block-is-as-trained": (V4, "8xh200", "tp8 dspark",
                            {"max-running-requests": 8, "speculative-dspark-block-size": 7}),
    "steps-are-not-mixed": (V4, "8xh200", "tp8 dspark",
                            {"max-running-requests": 8, "enable-mixed-chunk": True}),
}  # fmt: skip


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_refuses_what_breaks_it(rule: str) -> None:
    model, hardware, parts, flags = CASES[rule]
    launch = launch_of(model, hardware, parts, **{k.replace("-", "_"): v for k, v in flags.items()})
    assert rule in broken(launch)
    with pytest.raises(ConfigError, match=rule):
        require(launch)


@pytest.mark.parametrize("name", catalog.names("presets"))
def test_no_shipped_preset_breaks_a_rule(name: str) -> None:
    assert not broken(compose(catalog.preset(name)))


def test_dflash_cannot_draft_for_deepseek_v4() -> None:
    launch = launch_of(
        V4, "8xh200", "tp8 dflash", max_running_requests=8, speculative_draft_model_path="x"
    )
    assert broken(launch) == {"model-can-be-drafted-for"}


def test_context_parallel_prefill_drafts() -> None:
    """SGLang's worker does, and beside attention groups ours takes over."""
    flags = {"max_running_requests": 8, "speculative_draft_model_path": "x"}
    alone = launch_of(V4, "8xh200", "tp8 cp8-prefill dspark", max_running_requests=8)
    zigzag = {"attn_dp_size": 2, "attn_cp_size": 4, "enable_prefill_cp": True}
    zigzag |= {"cp_strategy": "zigzag", "enable_dp_lm_head": True} | flags
    beside = launch_of(QWEN, "8xh200", "tp8 ep8 dspark", **zigzag)
    assert broken(alone) == broken(beside) == set()


def test_dense_drafts_run_over_deepep_under_data_parallel_attention() -> None:
    launch = launch_of(
        QWEN, "8xh200", "tp8 dp8 ep8 deepep dspark", max_running_requests=64,
        speculative_draft_model_path="x", enable_dp_lm_head=True,
    )  # fmt: skip
    assert "attention-groups-can-draft" not in broken(launch)


@pytest.mark.parametrize(
    ("rule", "model", "parts", "flags", "said"),
    [
        ("graphs-cover-the-batch", V32, "tp8",
         {"cuda_graph_max_bs_decode": 32, "max_running_requests": 256}, "up to 32 requests, 256"),
        ("chunk-is-divided", V32, "tp8 dp8", {"chunked_prefill_size": 32768}, "4096 tokens each"),
        ("context-parallel-changes-sizes", V4, "tp8 cp8-prefill", {}, "in effect attn-cp 8, dp 1"),
        ("memory-share-was-seen-to-work", V4, "tp8", {"mem_fraction_static": 0.9}, "above 0.88"),
    ],
)  # fmt: skip
def test_what_sglang_changes_quietly_is_noted(
    rule: str, model: str, parts: str, flags: dict[str, Any], said: str
) -> None:
    found = [f for f in check(launch_of(model, "8xh200", parts, **flags)) if f.rule == rule]
    assert [f.level for f in found] == ["note"]
    assert said in found[0].reason
    fits = {"cuda_graph_max_bs_decode": 256, "max_running_requests": 256}
    assert rule not in {f.rule for f in check(launch_of(V32, "8xh200", "tp8", **fits))}


@pytest.mark.parametrize(
    ("model", "parts", "reason"),
    [
        (V32, "tp8 cp8-prefill ep8 deepep tbo", "no context-parallel plan"),
        (V32, "tp8 ep8 tbo", "nothing to overlap"),
        ("qwen3-32b", "tp8 tbo", "there are none"),
        (V4, "tp8 dp8 dspark tbo", "half with no tokens"),
        (V4, "tp8 dp8 ep8 deepep sbo", "only SGLang's DeepSeek-V3"),
        (V32, "tp8 dp8 sbo", "there is none"),
        (V32, "tp8 dp8 ep8 deepep sbo", "compute capability 9.x, and h200 is one"),
    ],
)
def test_overlap_is_refused_with_its_reason(model: str, parts: str, reason: str) -> None:
    launch = launch_of(model, "8xh200", parts, max_running_requests=8)
    assert any(reason in f.reason for f in check(launch) if f.rule == "overlap-limits")


@pytest.mark.parametrize(
    ("model", "machine", "parts"),
    [
        (V32, "cpu", "cpu tp2 dp2 ep2 deepep sbo"),
        (V4, "cpu", "cpu tp2 dp2 ep2 deepep sbo"),
        (V32, "8xb200", "tp8 dp8 ep8 deepep sbo"),
    ],
)
def test_a_cpu_and_blackwell_overlap_inside_a_batch(model: str, machine: str, parts: str) -> None:
    launch = launch_of(model, machine, parts, max_running_requests=8)
    assert [f.reason for f in check(launch) if f.rule == "overlap-limits"] == []


# refusal -> parts and flags that meet it on a CPU
ON_A_CPU: dict[str, tuple[str, dict[str, Any]]] = {
    "two-batch without exchange": ("dp2 tbo", {}),
    "two-batch with cp": ("ep2 deepep tbo", {"attn_cp_size": 2}),
    "two-batch with mixed chunk": ("dp2 ep2 deepep tbo", {"enable_mixed_chunk": True}),
    "single-batch without exchange": ("dp2 sbo", {}),
    "single-batch with two-batch": ("dp2 ep2 deepep sbo tbo", {}),
    "single-batch with cp": ("ep2 deepep sbo", {"attn_cp_size": 2}),
    "eplb with overlap": ("dp2 ep2 deepep tbo", {"enable_eplb": True}),
    "eplb with cp": ("ep2 deepep", {"enable_eplb": True, "attn_cp_size": 2}),
    "eplb with low latency": ("dp2 ep2 deepep", {"enable_eplb": True}),
    "eplb with stages": ("ep2 pp2", {"enable_eplb": True}),
    "two-batch with low latency": ("dp2 ep2 deepep tbo", {}),
    "pipeline with overlap": ("dp2 ep2 deepep sbo pp2", {}),
    "pipeline with cp": ("pp2", {"attn_cp_size": 2}),
    "exchange": ("dp2 ep2", {"moe_a2a_backend": "mooncake"}),
    "decode cp": ("", {"dcp_size": 2}),
    "moe dp": ("", {"moe_dp_size": 2}),
}
# They depend on the model, or on the algorithm.
ELSEWHERE = {
    "two-batch with speculation", "single-batch of other models", "cp backend",
    "pipeline with speculation",
}  # fmt: skip


def test_every_refusal_of_the_server_is_one_here() -> None:
    assert ON_A_CPU.keys() | ELSEWHERE == REFUSALS.keys()


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_cpu_refuses_what_its_server_would(name: str) -> None:
    parts, flags = ON_A_CPU[name]
    launch = launch_of(V32, "cpu", f"cpu tp2 {parts}", max_running_requests=8, **flags)
    said = [f for f in check(launch) if f.rule == "what-a-cpu-refuses"]
    wanted = REFUSALS[name]
    assert any(f.remedy == wanted.remedy and wanted.beside in f.reason for f in said)
    others = {f.rule for f in check(launch) if f.level == "error"} - {"what-a-cpu-refuses"}
    assert not others & {"overlap-limits", "balancing-sees-the-dispatch"}
    on_gpus = launch_of(V32, "8xh200", f"tp8 {parts}".replace("2", "8"), **flags)
    assert "what-a-cpu-refuses" not in broken(on_gpus)


@pytest.mark.parametrize("model", [V32, V4])
@pytest.mark.parametrize("algorithm", ["DSPARK", "EAGLE"])
def test_a_cpu_cuts_the_verifications_of_chains(model: str, algorithm: str) -> None:
    launch = launch_of(
        *(model, "cpu", "cpu tp2 dp2 ep2 deepep tbo"),
        speculative_algorithm=algorithm,
        speculative_draft_model_path="draft",
        max_running_requests=8,
    )
    said = [f.reason for f in check(launch) if f.rule == "overlap-limits"]
    uncut = "verifications of EAGLE are not cut in halves for this model."
    assert said == ([uncut] if (model, algorithm) == (V32, "EAGLE") else [])


@given(st.integers(1, 200), st.integers(0, 7), st.integers(1, 1100))
def test_dispatch_rule_is_running_times_rows(running: int, gamma: int, limit: int) -> None:
    launch = launch_of(
        V32, "8xh200", "tp8 dp8 ep8 deepep", {LIMIT: str(limit), "NVSHMEM_QP_DEPTH": "4096"},
        max_running_requests=running * 8, speculative_algorithm="EAGLE",
        speculative_num_draft_tokens=gamma + 1,
    )  # fmt: skip
    found = broken(launch)
    assert ("dispatch-fits-the-buffer" in found) == (running * (gamma + 1) > limit)
    assert ("dispatch-buffer-is-possible" in found) == (limit > 1024)


@pytest.mark.parametrize(("running", "noted"), [(63 * 8, True), (64 * 8, False)])
def test_two_batches_below_a_batch_that_pays_are_noted(running: int, noted: bool) -> None:
    parts = "tp8 dp8 ep8 deepep dense-tp1 tbo"
    found = check(launch_of(V32, "8xh200", parts, max_running_requests=running))
    assert [f.level for f in found if f.rule == "overlap-wants-a-batch"] == ["note"] * noted


def test_nvshmem_queues_must_hold_the_dispatch() -> None:
    launch = launch_of(V32, "8xh200", "tp8 ep8 deepep", {LIMIT: "512"}, max_running_requests=8)
    assert "dispatch-buffer-is-possible" in broken(launch)
    deep = {LIMIT: "512", "NVSHMEM_QP_DEPTH": "2048"}
    assert not broken(launch_of(V32, "8xh200", "tp8 ep8 deepep", deep, max_running_requests=8))


@given(st.integers(1, 512), st.integers(1, 64))
def test_redundant_experts_fill_the_ranks_with_as_few_as_possible(experts: int, ep: int) -> None:
    redundant = fill_redundant(experts, ep)
    assert redundant == (ep - experts % ep) % ep
    assert (experts + redundant) % ep == 0
    assert 0 <= redundant < ep


def test_prefill_and_decode_roles_may_use_what_a_mixed_server_may_not() -> None:
    decode = launch_of(
        V32, "8xh200", "tp8 dp8 ep8 deepep pd-decode", deepep_mode="low_latency",
        max_running_requests=64,
    )  # fmt: skip
    prefill = launch_of(V32, "8xh200", "tp8 dp8 ep8 deepep pd-prefill", deepep_mode="normal")
    assert not broken(decode)
    assert not broken(prefill)


@pytest.mark.parametrize(
    ("hardware", "algorithm", "fine"),
    [("8xh200", "dspark", True), ("8xh200", "dflash", False), ("cpu", "dspark", False)],
)
def test_a_prefill_half_over_pipeline_stages_takes_one_of_the_drafts(
    hardware: str, algorithm: str, fine: bool
) -> None:
    on_cpu = hardware == "cpu"
    parts = f"{'cpu tp1' if on_cpu else 'tp4'} pp2 pd-prefill {algorithm}"
    launch = launch_of("qwen3-8b", hardware, parts, max_running_requests=8)
    assert broken(launch) == (set() if fine else {"pipeline-limits"})


def _write_kimi(folder: Path) -> None:
    config: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"]}
    config |= {"num_attention_heads": 32, "linear_attn_config": {"kda_layers": [1, 2, 3]}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("block", "ring", "fine"), [(7, 16, True), (8, 16, False), (8, 32, True), (3, 24, False)]
)
def test_a_replay_ring_holds_two_verifications(
    block: int, ring: int, fine: bool, tmp_path: Path
) -> None:
    """Of recurrent layers rolled back by replay: SGLang finds out when the weights are loaded."""
    _write_kimi(tmp_path)
    flags = {"max_running_requests": 8, "speculative_draft_model_path": "x"}
    flags |= {"speculative_dspark_block_size": block, "linear_replayssm_cache_len": ring}
    launch = launch_of(str(tmp_path), "8xh200", "tp8 dspark", **flags)
    assert not broken(launch)
    replayed = launch_of(
        str(tmp_path), "8xh200", "tp8 dspark", enable_linear_replayssm_spec=True, **flags
    )
    assert broken(replayed) == (set() if fine else {"replay-ring-holds-two-rounds"})
    said = " ".join(f.remedy for f in check(replayed))
    assert fine or f"--linear-replayssm-cache-len {32 if block == 8 else 8}" in said


@pytest.mark.parametrize(
    ("flags", "fine"),
    [
        ({"speculative_algorithm": "DFLASH", "speculative_dflash_block_size": 16}, False),
        ({"speculative_algorithm": "DFLASH", "speculative_dflash_block_size": 8}, True),
        ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 8}, False),
        (
            {
                "speculative_algorithm": "NEXTN",
                "speculative_num_steps": 3,
                "linear_replayssm_cache_len": 8,
            },
            True,
        ),
    ],
)
def test_a_replay_ring_counts_the_rows_of_every_algorithm(
    flags: dict[str, Any], fine: bool, tmp_path: Path
) -> None:
    _write_kimi(tmp_path)
    common = {"max_running_requests": 8, "speculative_draft_model_path": "x"}
    replayed = launch_of(
        str(tmp_path), "8xh200", "tp8", enable_linear_replayssm_spec=True, **common, **flags
    )
    assert ("replay-ring-holds-two-rounds" in broken(replayed)) is not fine


def test_parts_that_disagree_are_refused_unless_the_preset_settles_it() -> None:
    with pytest.raises(ConfigError, match="parts, tp-size"):
        launch_of(V32, "8xh200", "tp8 tp4")
    assert launch_of(V32, "8xh200", "tp8 tp4", tp_size=8).flags["tp-size"] == 8


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("api-key=0123456", "0123456"),
        ("revision=12345e67", "12345e67"),
        ("served-model-name=true", "true"),
        ("served-model-name=1_0", "1_0"),
        ("ep=1", 1),
        ("mem-fraction-static=0.5", 0.5),
        ("mem-fraction-static=1e-1", 0.1),
    ],
)
def test_a_value_is_read_by_its_flags_kind_not_by_its_look(setting: str, value: object) -> None:
    name = {"ep=1": "ep-size"}.get(setting, setting.split("=")[0])
    preset = catalog.preset("demo-cpu-balanced")
    ways: list[tuple[list[str], list[str]]]
    ways = [([setting], []), ([], [f"--{setting}"]), ([], f"--{setting}".split("="))]
    for settings, extra in ways:
        launch = compose(preset, settings, extra)
        assert launch.effective()[name] == value
        assert type(launch.effective()[name]) is type(value)


def test_a_switch_is_turned_by_set_and_takes_no_word() -> None:
    preset = catalog.preset("demo-cpu-balanced")
    assert compose(preset, ["enable-metrics=true"]).flags["enable-metrics"] is True
    assert "--enable-metrics" not in compose(preset, ["enable-metrics=False"]).argv()
    for extra in (["--enable-metrics=true"], ["--enable-metrics", "true"]):
        with pytest.raises(ConfigError, match="nothing after it"):
            compose(preset, [], extra)


def test_a_server_over_nodes_needs_all_of_them_and_an_address() -> None:
    launch = launch_of(V32, "2x8xh200", "tp16")
    with pytest.raises(ConfigError, match="--nnodes"):
        for_node(launch, 1, 0, None)
    with pytest.raises(ConfigError, match="--dist-init-addr"):
        for_node(launch, 2, 0, None)
    with pytest.raises(ConfigError, match="--node-rank"):
        for_node(launch, 2, 2, "a:1")
    assert for_node(launch, 2, 1, "a:1").argv()[-6:] == [
        "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "a:1",
    ]  # fmt: skip
