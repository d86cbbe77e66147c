"""NEXTN on DeepSeek-V4: arguments that are decided or refused, tensors that must be there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.core.spec.draft_fields import DraftConfigError
from sglang_ext.srt.models.claims import claim_of
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4ConfigError, parse
from sglang_ext.srt.models.deepseek_v4_load import DeepseekV4TensorError, TensorReader
from sglang_ext.srt.models.deepseek_v4_names import TARGET_NAMES, mtp_tensors
from sglang_ext.srt.models.deepseek_v4_nextn_args import STEPS, module_view, parse_module
from sglang_ext.srt.models.deepseek_v4_setup import MODULE
from sglang_ext.tiny_model.deepseek_v4 import random_tensors, stored, tiny_config, write

FLASH = {
    "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "index_head_dim": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("v4") / "target", layers=2, with_mtp=True)


def resolve(target: Path, *flags: object) -> Any:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    given = ["--model-path", target, "--dtype", "float32", *flags]
    args = prepare_server_args([str(flag) for flag in given])
    args.resolve_once()
    return resolved_view(args)


@pytest.mark.parametrize(
    ("algorithm", "flags", "steps"),
    [
        ("NEXTN", (), STEPS),
        ("EAGLE", ("--speculative-num-steps", 1), 1),
        ("NEXTN", ("--speculative-num-draft-tokens", 3), 2),
        ("NEXTN", ("--speculative-num-steps", 4, "--speculative-num-draft-tokens", 5), 4),
    ],
)
def test_no_draft_path_is_needed(
    target: Path, algorithm: str, flags: tuple[object, ...], steps: int
) -> None:
    cfg = resolve(target, "--speculative-algorithm", algorithm, *flags)
    found = (
        cfg.speculative_num_steps,
        cfg.speculative_eagle_topk,
        cfg.speculative_num_draft_tokens,
    )
    assert found == (steps, 1, steps + 1)
    view = Path(cfg.speculative_draft_model_path)
    assert (view / "model.safetensors").resolve() == (target / "model.safetensors").resolve()


def test_the_target_may_be_named_as_its_own_draft(target: Path) -> None:
    flags = ("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", target)
    assert resolve(target, *flags).speculative_draft_model_path != str(target)


REFUSED: tuple[tuple[object, ...], ...] = (
    ("--speculative-draft-model-path", "/elsewhere"),
    ("--speculative-eagle-topk", 2),
    ("--speculative-draft-attention-backend", "torch_native"),
    ("--speculative-draft-model-quantization", "fp8"),
    ("--speculative-draft-kv-cache-dtype", "fp8_e4m3"),
    ("--speculative-draft-window-size", 8),
    ("--speculative-token-map", "map.pt"),
    ("--speculative-adaptive",),
    ("--enable-multi-layer-eagle",),
    ("--speculative-use-rejection-sampling",),
    ("--enable-return-hidden-states",),
    ("--speculative-moe-a2a-backend", "deepep"),
    ("--speculative-num-steps", 0),
    ("--speculative-num-steps", 2, "--speculative-num-draft-tokens", 5),
)


@pytest.mark.parametrize("flags", REFUSED, ids=lambda f: str(f[0]))
def test_refused_flags_are_named(target: Path, flags: tuple[object, ...]) -> None:
    more = () if flags[0] == "--speculative-num-steps" else ("--speculative-num-steps", 2)
    with pytest.raises(ValueError, match=rf"{flags[0]}.*: expected .* found"):
        resolve(target, "--speculative-algorithm", "NEXTN", *more, *flags)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NGRAM"])
def test_other_algorithms_are_refused(target: Path, algorithm: str) -> None:
    with pytest.raises(ValueError, match="--speculative-algorithm: expected unset"):
        resolve(target, "--speculative-algorithm", algorithm)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (tiny_config(2), "num_nextn_predict_layers"),
        (tiny_config(2, num_nextn_predict_layers=2), "num_nextn_predict_layers"),
        (tiny_config(2, with_dspark=True, num_nextn_predict_layers=1), "dspark_block_size"),
    ],
)
def test_a_checkpoint_without_a_module_is_refused(raw: dict[str, Any], field: str) -> None:
    with pytest.raises(DeepseekV4ConfigError, match=rf"{field}: expected .*NEXTN, found"):
        parse_module(raw)


def test_the_module_has_the_published_tensors() -> None:
    """1575 of them in DeepSeek-V4-Flash: 797, and a scale for 778."""
    tensors = mtp_tensors(parse(tiny_config(2, with_mtp=True, **FLASH)))
    scaled = [n for n, shape in tensors.items() if len(shape) == 2 and n.endswith(".weight")]
    scaled.remove("mtp.0.ffn.gate.weight")
    assert (len(tensors), len(scaled)) == (797, 778)
    assert tensors["mtp.0.attn.wo_a.weight"] == (8192, 4096)


Change = Callable[[dict[str, Tensor]], object]
NAME = "mtp.0.h_proj.weight"
BROKEN: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop(NAME), r"h_proj\.weight: expected a tensor"),
    "surplus": (
        lambda t: t.update({"mtp.1.enorm.weight": t[NAME][0].clone()}),
        r"mtp\.1\.enorm.*unknown",
    ),
    "misshaped": (lambda t: t.update({NAME: t[NAME][:-1]}), r"h_proj\.weight: expected shape"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_wrong_tensors_are_named(target: Path, tmp_path: Path, kind: str) -> None:
    """In the headers, before anything is started, and once more while they are read."""
    change, message = BROKEN[kind]
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(DraftConfigError, match=message):
        module_view(tmp_path)
    with pytest.raises(DeepseekV4TensorError, match=message):
        read(json.loads((tmp_path / "config.json").read_text()), tensors)


def read(raw: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from sglang_ext.srt.models.strict_weights import refuse_missing

    config = parse_module(raw)
    reader = TensorReader(config, mtp_tensors(config), passed=TARGET_NAMES)
    found = dict(reader.read(tensors.items()))
    refuse_missing(reader.missing(), DeepseekV4TensorError)
    return found


@pytest.mark.parametrize("quant", ["none", "fp8", "fp4"])
def test_a_whole_module_is_read(quant: Any) -> None:
    raw = tiny_config(2, with_mtp=True)
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = read(raw, stored(random_tensors(raw), quant, torch.float32))
    assert found.keys() == mtp_tensors(parse(raw)).keys()


def test_the_view_is_claimed_as_one_window_layer(target: Path) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.hf_transformers_utils import get_config

    load_plugins()
    config = get_config(str(module_view(target)), trust_remote_code=False)
    assert claim_of(config) is MODULE
    assert MODULE.read(config).compress_ratios == (0,)
    assert config.num_hidden_layers == 1
