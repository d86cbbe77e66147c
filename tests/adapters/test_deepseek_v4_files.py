"""DeepSeek-V4's config.json and tensors, read strictly: what is wrong is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sglang_ext.srt.cache.dsv4_pool import bytes_per_token
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4ConfigError, parse
from sglang_ext.srt.models.deepseek_v4_load import DeepseekV4TensorError, TensorReader
from sglang_ext.srt.models.deepseek_v4_names import (
    canonical,
    dspark_tensors,
    required_tensors,
)
from sglang_ext.tiny_model.deepseek_v4 import random_tensors, stored, tiny_config

HF_TYPES = [
    "sliding_attention",
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
]


# Of DeepSeek-V4-Flash, but for its compress_ratios.
PUBLISHED: dict[str, Any] = {
    **tiny_config(),
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
}


def _nested(**more: Any) -> dict[str, Any]:
    """YaRN as transformers spells it."""
    yarn = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64}
    main = {"rope_type": "default", "rope_theta": 10000.0}
    return {"main": main, "compress": {"rope_theta": 160000.0, **yarn, **more}}


WRONG = [
    ({"compress_ratios": [0, 0, 4, 64]}, "compress_ratios", "one of 0, 4, 128"),
    ({"compress_ratios": [0, 0, 4]}, "compress_ratios", "4 layers"),
    ({"compress_ratios": [0, 0, 4, 128, 4]}, "compress_ratios", "0 for what follows"),
    ({"layer_types": HF_TYPES[::-1]}, "compress_ratios", "as layer_types says"),
    ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types", "hash_moe, then"),
    ({"num_hash_layers": 3, "mlp_layer_types": ["hash_moe"] + ["moe"] * 3}, "num_hash_layers", "1"),
    ({"head_dim": "512"}, "head_dim", "a whole number"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim", "even"),
    ({"o_groups": 3}, "o_groups", "a divisor"),
    ({"scoring_func": "softmax"}, "scoring_func", "sqrtsoftplus"),
    ({"n_shared_experts": 2}, "n_shared_experts", "1"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type", "yarn"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2}},
        "original_max_position_embeddings",
        "positive number",
    ),
    ({"rope_parameters": _nested()}, "rope_parameters.compress", "attention_factor 1"),
    ({"rope_parameters": _nested(attention_factor=1.2)}, "rope_parameters.compress", "factor 1"),
    (
        {"rope_parameters": _nested(attention_factor=1.0, partial_rotary_factor=0.5)},
        "partial_rotary_factor",
        "0.25, qk_rope_head_dim 8",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.25, qk_rope_head_dim 8"),
    (
        {"rope_parameters": _nested(attention_factor=1.0), "rope_scaling": {"type": "default"}},
        "rope_scaling",
        "what rope_parameters.compress says",
    ),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.main.rope_theta", "positive"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "fp8"),
    ({"dspark_block_size": 5}, "dspark_target_layer_ids", "layers 0 to 3"),
]


@pytest.mark.parametrize(("change", "field", "expected"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_fields_are_named(change: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(DeepseekV4ConfigError) as caught:
        parse(tiny_config(4) | change)
    assert field in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("more", [{"attention_factor": 1.0}, {"mscale": 1, "mscale_all_dim": 1}])
def test_yarn_without_a_factor_on_the_rotation(more: dict[str, Any]) -> None:
    """transformers leaves its default thetas beside the nested ones, which count."""
    beside = {"rope_theta": 1.0, "compress_rope_theta": 1.0}
    found = parse(tiny_config(4) | beside | {"rope_parameters": _nested(**more)})
    assert found.yarn is not None
    assert found.yarn.factor == 16
    assert (found.rope_theta, found.compress_rope_theta) == (10000.0, 160000.0)


def test_the_published_sizes() -> None:
    """Parameters and draft tensors of the checkpoints, as their cards and indices count them."""
    flash = PUBLISHED | {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
    assert _billions(required_tensors(parse(flash))) == pytest.approx(284, abs=1)
    with_draft = flash | {
        "compress_ratios": [*flash["compress_ratios"], 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    draft = dspark_tensors(parse(with_draft))
    assert len(draft) == 2376
    assert _billions(draft) == pytest.approx(19.85, abs=0.01)
    pro = PUBLISHED | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.5,
        "index_topk": 1024,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    }
    assert _billions(required_tensors(parse(pro))) == pytest.approx(1600, rel=0.02)


def _billions(shapes: dict[str, tuple[int, ...]]) -> float:
    return sum(map(math.prod, shapes.values())) / 1e9


def test_missing_fields_are_named() -> None:
    raw = tiny_config(4)
    del raw["index_topk"]
    with pytest.raises(DeepseekV4ConfigError, match="index_topk: expected a whole number"):
        parse(raw)


def test_both_spellings_mean_the_same() -> None:
    raw = tiny_config(4)
    theirs = dict(raw)
    for field in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_theta"):
        del theirs[field]
    theirs |= {
        "layer_types": HF_TYPES,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "partial_rotary_factor": raw["qk_rope_head_dim"] / raw["head_dim"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {"rope_type": "default", "rope_theta": 160000.0},
        },
    }
    assert parse(theirs) == parse(raw)


def test_transformers_names_lead_to_the_published_ones() -> None:
    """Every tensor that transformers' module of the same config has is recognised."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    raw = {k: v for k, v in tiny_config(4).items() if k not in ("architectures", "torch_dtype")}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**raw))
    found = {canonical(name) for name in model.state_dict()}
    wanted = {n for n in required_tensors(parse(tiny_config(4))) if ".experts." not in n}
    assert wanted == {n for n in found if ".experts." not in n}


def _reader(raw: dict[str, Any]) -> TensorReader:
    config = parse(raw)
    return TensorReader(config, required_tensors(config), passed=("mtp.",))


@pytest.mark.parametrize("quant", ["none", "fp8", "fp4"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_whole_checkpoint_is_read(quant: Any, backwards: bool) -> None:
    raw = tiny_config(4, with_dspark=True)
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = list(stored(random_tensors(raw), quant, torch.float32).items())
    reader = _reader(raw)
    assert len(list(reader.read(tensors[::-1] if backwards else tensors))) == len(reader.wanted)
    assert reader.missing() == []


def _spoilt(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    name = "layers.2.attn.compressor.wkv.weight"
    if kind == "surplus":
        return tensors | {"layers.2.attn.extra.weight": torch.zeros(2, 2)}
    if kind == "misshaped":
        return tensors | {name: tensors[name][:-1]}
    if kind == "scale alone":
        return tensors | {name.removesuffix("weight") + "scale": torch.zeros(1, 1)}
    return tensors | {"layers.0.ffn.gate.tid2eid": tensors["layers.0.ffn.gate.tid2eid"] + 99}


@pytest.mark.parametrize("kind", ["surplus", "misshaped", "scale alone", "expert id"])
def test_wrong_tensors_are_named(kind: str) -> None:
    raw = tiny_config(4)
    with pytest.raises(DeepseekV4TensorError, match=r"layers\.\d\."):
        list(_reader(raw).read(_spoilt(random_tensors(raw), kind).items()))


def test_a_missing_tensor_is_known() -> None:
    raw = tiny_config(4)
    tensors = random_tensors(raw)
    del tensors["hc_head_fn"]
    reader = _reader(raw)
    list(reader.read(tensors.items()))
    assert reader.missing() == ["hc_head_fn"]


def test_the_bundled_draft_has_the_published_tensors() -> None:
    raw = tiny_config(4, with_dspark=True)
    found = {n: tuple(t.shape) for n, t in random_tensors(raw).items() if n.startswith("mtp.")}
    assert found == dspark_tensors(parse(raw))


def test_bytes_per_token() -> None:
    """By hand: dim 32, index dim 16, float32; ratios 0, 0, 4, 128."""
    config = parse(tiny_config(4))
    latent, csa_raw, hca_raw = 4 * 32, 4 * 128, 4 * 64
    index_raw, entry, key = 4 * 64, 4 * 32, 4 * 16
    every = 4 * latent + csa_raw + hca_raw + index_raw
    assert bytes_per_token(config, torch.float32, 1) == every + 2 * entry + key
    assert bytes_per_token(config, torch.float32, 128) == every + (entry + key) // 4 + entry // 128
