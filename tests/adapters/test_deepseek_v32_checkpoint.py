"""Bad DeepSeek-V3.2 checkpoints are refused by name; fp8 ones are widened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32ConfigError, parse
from sglang_ext.srt.models.deepseek_v32_load import DeepseekV32TensorError, TensorReader
from sglang_ext.srt.models.deepseek_v32_names import is_mtp, placement, required_tensors
from sglang_ext.tiny_model.deepseek_v32 import random_tensors, stored, tiny_config, write

OFFICIAL = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}


def test_the_published_configuration_is_read() -> None:
    config = parse(tiny_config(**OFFICIAL))
    assert (config.latent_dim, config.qk_head_dim, config.fp8_block) == (576, 192, (128, 128))
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    # 61 layers, 256 experts with three matrices each in 58 of them.
    assert len(required_tensors(config)) == 3 + 61 * 14 + 3 * 3 + 58 * (2 + 3 + 256 * 3)


BAD_FIELDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "negative": ({"index_topk": 0}, ("index_topk", "at least 1", "0")),
    "text": ({"kv_lora_rank": "512"}, ("kv_lora_rank", "whole number", "'512'")),
    "groups": ({"n_group": 3}, ("n_group", "divisor of n_routed_experts 8", "3")),
    "chosen groups": ({"topk_group": 9}, ("topk_group", "at most n_group 4", "9")),
    "scoring": ({"scoring_func": "softmax"}, ("scoring_func", "sigmoid", "softmax")),
    "activation": ({"hidden_act": "gelu"}, ("hidden_act", "silu", "gelu")),
    "bias": ({"attention_bias": True}, ("attention_bias", "False", "True")),
    "tied": ({"tie_word_embeddings": True}, ("tie_word_embeddings", "False", "True")),
    "rope": ({"rope_scaling": {"type": "linear"}}, ("rope_type", "default or yarn", "linear")),
    "yarn without length": (
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        ("original_max_position_embeddings", "positive number", "nothing"),
    ),
    "rope in part": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("partial_rotary_factor", "expected 1", "0.5"),
    ),
    "rope wider than the index": ({"qk_rope_head_dim": 32}, ("qk_rope_head_dim", "16", "32")),
    "quantisation": (
        {"quantization_config": {"quant_method": "awq"}},
        ("quantization_config", "fp8", "awq"),
    ),
    "layer kinds": (
        {"mlp_layer_types": ["sparse"] * 4},
        ("mlp_layer_types", "1 dense layers", "sparse"),
    ),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_fields_are_named(name: str) -> None:
    changes, words = BAD_FIELDS[name]
    with pytest.raises(DeepseekV32ConfigError) as raised:
        parse(tiny_config(**changes))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("field", ["index_topk", "q_lora_rank", "norm_topk_prob", "rope_theta"])
def test_missing_fields_are_named(field: str) -> None:
    raw = tiny_config()
    del raw[field]
    with pytest.raises(DeepseekV32ConfigError, match=f"{field}: expected .*, found nothing"):
        parse(raw)


def _read(
    tensors: dict[str, Tensor], keep: Callable[[int], bool] = lambda _: True, **changes: Any
) -> tuple[dict[str, Tensor], list[str]]:
    reader = TensorReader(parse(tiny_config(**changes)), keep)
    return dict(reader.read(tensors.items())), reader.missing()


def _tensors(**changes: Any) -> dict[str, Tensor]:
    return random_tensors(parse(tiny_config(**changes)), seed=0, mixing=0.5)


def test_every_tensor_is_placed() -> None:
    tensors = _tensors(num_nextn_predict_layers=1)
    read, missing = _read(tensors, num_nextn_predict_layers=1)
    assert not missing
    assert set(read) == {n for n in tensors if not n.startswith("model.layers.4.")}
    for name in read:
        assert placement(name).parameter


def test_missing_is_reported() -> None:
    tensors = _tensors()
    del tensors["model.layers.2.self_attn.indexer.k_norm.bias"]
    assert _read(tensors)[1] == ["model.layers.2.self_attn.indexer.k_norm.bias"]


BAD_TENSORS: dict[str, tuple[str, Tensor, tuple[str, ...]]] = {
    "unknown": ("model.layers.0.self_attn.indexer.wz.weight", torch.zeros(2), ("unknown name",)),
    "misspelt in the MTP layer": (
        "model.layers.4.eh_prj.weight",
        torch.zeros(2),
        ("eh_prj", "unknown name"),
    ),
    "another shape": ("model.norm.weight", torch.zeros(65), ("[64]", "[65]")),
    "whole numbers": ("model.norm.weight", torch.zeros(64).int(), ("fp32", "int32")),
    "a scale nobody announced": (
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv",
        torch.zeros(1, 1),
        ("no quantization_config",),
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_named(name: str) -> None:
    tensor_name, value, words = BAD_TENSORS[name]
    with pytest.raises(DeepseekV32TensorError) as raised:
        _read(_tensors() | {tensor_name: value}, num_nextn_predict_layers=1)
    assert raised.value.tensor == tensor_name
    assert all(word in str(raised.value) for word in words), raised.value


QUANTISED = {"quant_method": "fp8", "weight_block_size": [16, 16]}


def test_fp8_is_widened_in_any_order() -> None:
    tensors = _tensors()
    held = stored(tensors, fp8_block=(16, 16), dtype=torch.bfloat16)
    assert any(t.dtype == torch.float8_e4m3fn for t in held.values())
    for items in (held, dict(reversed(held.items()))):
        read, missing = _read(items, quantization_config=QUANTISED)
        assert not missing
        assert set(read) == set(tensors)
        for name, value in read.items():
            step = tensors[name].abs().max() / 8
            assert bool(((value.float() - tensors[name]).abs() <= step).all()), name


@pytest.mark.parametrize("lost", ["weight", "weight_scale_inv"])
def test_fp8_halves_need_each_other(lost: str) -> None:
    held = stored(_tensors(), fp8_block=(16, 16), dtype=torch.float32)
    del held[f"model.layers.1.self_attn.o_proj.{lost}"]
    with pytest.raises(DeepseekV32TensorError, match=r"o_proj.*beside it"):
        _read(held, quantization_config=QUANTISED)


def test_a_pipeline_stage_wants_its_own_layers_only() -> None:
    read, missing = _read(_tensors(), keep=lambda layer: layer in (1, 2))
    assert not missing
    assert {n.split(".")[2] for n in read if n.startswith("model.layers.")} == {"1", "2"}


def test_mtp_is_told_from_the_target() -> None:
    config = parse(tiny_config(num_nextn_predict_layers=1))
    assert is_mtp("model.layers.4.enorm.weight", config)
    assert is_mtp("model.layers.4.self_attn.q_a_proj.weight_scale_inv", config)
    assert not is_mtp("model.layers.3.self_attn.q_a_proj.weight", config)
    assert not is_mtp("model.layers.5.enorm.weight", config)


def test_written_files_are_complete(tmp_path: Path) -> None:
    folder = write(tmp_path, fp8_block=(128, 128), dtype=torch.bfloat16, q_lora_rank=130)
    raw = json.loads((folder / "config.json").read_text())
    reader = TensorReader(parse(raw), lambda _: True)
    list(reader.read(load_file(folder / "model.safetensors").items()))
    assert not reader.missing()
