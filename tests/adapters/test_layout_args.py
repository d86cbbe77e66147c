"""Layouts that cannot be exact are refused while arguments are read, in the words of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.core.refusals import REFUSALS
from sglang_ext.core.support import LAYOUTS, NEXTN, UNTRIED, V4, V32, verdict
from sglang_ext.srt.parallel.layout_args import LayoutError
from tests.tiny import make_draft, make_target

DP2 = ("--tp-size", "2", "--attn-dp-size", "2")
DEEPEP = ("--moe-a2a-backend", "deepep")
CP2 = ("--tp-size", "2", "--attn-cp-size", "2", "--enable-prefill-cp", "--cp-strategy", "zigzag")

# refusal -> flags that meet it
MEETS: dict[str, tuple[str, ...]] = {
    "two-batch without exchange": (*DP2, "--enable-two-batch-overlap"),
    "two-batch with cp": (*CP2, *DEEPEP, "--deepep-mode", "normal", "--enable-two-batch-overlap"),
    "two-batch with mixed chunk": (
        *(*DP2, *DEEPEP, "--deepep-mode", "normal", "--enable-two-batch-overlap"),
        "--enable-mixed-chunk",
    ),
    "two-batch with speculation": (
        *(*DP2, *DEEPEP, "--deepep-mode", "normal", "--enable-two-batch-overlap"),
        *("--speculative-algorithm", "NGRAM"),
    ),
    "single-batch without exchange": (*DP2, "--enable-single-batch-overlap"),
    "single-batch with two-batch": (
        *(*DP2, *DEEPEP, "--deepep-mode", "normal"),
        *("--enable-single-batch-overlap", "--enable-two-batch-overlap"),
    ),
    "single-batch with cp": (
        *(*CP2, *DEEPEP, "--deepep-mode", "normal"),
        "--enable-single-batch-overlap",
    ),
    "eplb with overlap": (
        *(*DP2, *DEEPEP, "--deepep-mode", "normal"),
        *("--enable-eplb", "--enable-two-batch-overlap"),
    ),
    "eplb with cp": (*CP2, *DEEPEP, "--deepep-mode", "normal", "--enable-eplb"),
    "two-batch with low latency": (*DP2, *DEEPEP, "--enable-two-batch-overlap"),
    "eplb with stages": (*DP2, "--ep-size", "2", "--pp-size", "2", "--enable-eplb"),
    "pipeline with overlap": (
        *(*DP2, *DEEPEP, "--pp-size", "2"),
        "--enable-single-batch-overlap",
    ),
    "pipeline with cp": (*CP2, "--pp-size", "2"),
    "eplb with low latency": (*DP2, *DEEPEP, "--enable-eplb"),
    "exchange": (*DP2, "--moe-a2a-backend", "mooncake"),
    "cp backend": (*CP2, "--attention-backend", "torch_native"),
    "decode cp": ("--tp-size", "2", "--dcp-size", "2"),
    "moe dp": ("--tp-size", "2", "--moe-dp-size", "2"),
}
WITH_DRAFT: dict[str, tuple[str, ...]] = {"pipeline with speculation": ("--pp-size", "2")}

# refusal -> the kind of model that meets it with these flags
OF_MODEL: dict[str, tuple[str, tuple[str, ...]]] = {
    "single-batch of other models": ("qwen3", (*DP2, *DEEPEP, "--enable-single-batch-overlap")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    target = make_target(folder / "target", "qwen3_moe")
    return target, make_draft(folder / "draft", "DSPARK", target)


def _resolve(target: Path, *flags: str) -> Any:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    args = prepare_server_args(["--model-path", str(target), *flags])
    args.resolve_once()
    return args


def _drafting(draft: Path) -> tuple[str, ...]:
    return ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft))


def test_every_refusal_is_tried() -> None:
    assert MEETS.keys() | WITH_DRAFT.keys() | OF_MODEL.keys() == REFUSALS.keys()


@pytest.mark.parametrize("name", MEETS)
def test_refused(models: tuple[Path, Path], name: str) -> None:
    with pytest.raises(LayoutError) as error:
        _resolve(models[0], *MEETS[name])
    for words in (REFUSALS[name].flag, "expected", "found", REFUSALS[name].remedy):
        assert words in str(error.value)


@pytest.mark.parametrize("name", WITH_DRAFT)
def test_refused_with_speculation(models: tuple[Path, Path], name: str) -> None:
    target, draft = models
    with pytest.raises(ValueError, match=REFUSALS[name].flag) as error:
        _resolve(target, *WITH_DRAFT[name], *_drafting(draft))
    assert "expected" in str(error.value)


@pytest.mark.parametrize("name", OF_MODEL)
def test_refused_for_a_model(tmp_path: Path, name: str) -> None:
    kind, flags = OF_MODEL[name]
    with pytest.raises(LayoutError, match=REFUSALS[name].flag) as error:
        _resolve(make_target(tmp_path / "model", kind), *flags)
    assert "found Qwen3ForCausalLM" in str(error.value)


@pytest.mark.parametrize("where", LAYOUTS, ids=lambda x: x.name)
def test_every_layout_of_the_table_resolves(models: tuple[Path, Path], where: Any) -> None:
    target, draft = models
    _resolve(target, *where.flags)
    if where.speculation is None:
        _resolve(target, *where.flags, *_drafting(draft))
    else:
        with pytest.raises(ValueError, match="expected"):
            _resolve(target, *where.flags, *_drafting(draft))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("deepseek")
    kinds = {V32: "deepseek_v32", V4: "deepseek_v4"}
    return {model: make_target(folder / kind, kind) for model, kind in kinds.items()}


@pytest.fixture(scope="module")
def with_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nextn") / "v4"
    return make_target(folder, "deepseek_v4", with_dspark=False, with_mtp=True)


@pytest.mark.parametrize("model", [V32, V4])
def test_layouts_of_deepseek_models(deepseek: dict[str, Path], model: str) -> None:
    """What the table refuses for a model is refused in its words; everything else resolves."""
    for where in LAYOUTS:
        reason = dict(where.refused).get(model)
        if reason is None:
            _resolve(deepseek[model], *where.flags)
            continue
        with pytest.raises(ValueError, match="expected unset") as error:
            _resolve(deepseek[model], *where.flags)
        assert reason[1:] in str(error.value), where.name


def test_layouts_of_the_module_of_deepseek_v4(with_module: Path) -> None:
    """NEXTN: what the table refuses is refused in its words; everything else resolves."""
    for where in LAYOUTS:
        flags = (*where.flags, "--speculative-algorithm", NEXTN)
        reason = verdict(where, V4, NEXTN, "short").reason
        if reason in ("", UNTRIED):
            _resolve(with_module, *flags)
            continue
        with pytest.raises(ValueError, match="expected") as error:
            _resolve(with_module, *flags)
        assert reason[1:] in str(error.value), where.name


def test_the_limit_of_low_latency_exchange(
    models: tuple[Path, Path], with_module: Path, monkeypatch: Any
) -> None:
    target, draft = models
    auto = (*DP2, *DEEPEP, "--chunked-prefill-size", "64")
    # 128 rows a rank, one row a request, two ranks.
    assert _resolve(target, *auto).resolved_dict()["max_running_requests"] == 256
    # Gamma 4: five rows a request.
    drafting = _resolve(target, *auto, *_drafting(draft))
    assert drafting.resolved_dict()["max_running_requests"] == 128 // 5 * 2
    # Beside NEXTN SGLang sets 48 where none was given; four rows a request.
    nextn = (*DEEPEP, "--chunked-prefill-size", "64", "--speculative-algorithm", NEXTN)
    for ranks in (("--tp-size", "2"), DP2):
        most = 128 // 4 * (2 if ranks is DP2 else 1)
        found = _resolve(with_module, *ranks, *nextn).resolved_dict()["max_running_requests"]
        assert found == most
    with pytest.raises(LayoutError, match=r"at most 32 .* found 48"):
        _resolve(with_module, "--tp-size", "2", *nextn, "--max-running-requests", "48")
    with pytest.raises(LayoutError, match=r"at most 256 .* found 257"):
        _resolve(target, *auto, "--max-running-requests", "257")
    with pytest.raises(LayoutError, match=r"--chunked-prefill-size: .* 1 to 256 .* found 8192"):
        _resolve(
            target, *DP2, *DEEPEP, "--deepep-mode", "low_latency", "--chunked-prefill-size", "8192"
        )
    monkeypatch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "4")
    with pytest.raises(LayoutError, match="at most 0"):
        _resolve(target, *auto, *_drafting(draft))
