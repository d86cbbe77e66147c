"""A DeepSeek-V4 checkpoint of random weights in the official format: names, fields, storage.

Every part of the architecture is there: window, CSA and HCA layers, hash and top-k routing,
hyper-connections, and on request fp8 matrices, fp4 experts and a draft, DSpark or MTP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.core.quant import quantise_fp4, quantise_fp8
from sglang_ext.srt.models.deepseek_v4_config import parse
from sglang_ext.srt.models.deepseek_v4_names import (
    Shape,
    dspark_tensors,
    mtp_tensors,
    required_tensors,
)
from sglang_ext.tiny_model.folder import MARK, WEIGHTS
from sglang_ext.tiny_model.tokenizer import EOS, MASK, PAD, save_tokenizer

Quant = Literal["none", "fp8", "fp4"]
DSPARK_STAGES = 3
# What SGLang's chat format of DeepSeek-V4 looks up in a tokenizer.
_EOS = "<｜end▁of▁sentence｜>"
_CHAT = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")


def tiny_config(
    layers: int = 6, *, with_dspark: bool = False, with_mtp: bool = False, **changes: Any
) -> dict[str, Any]:
    """config.json with the official fields; ratios 0, 0, then CSA and HCA in turn."""
    ratios = [0, 0, *(4 if i % 2 == 0 else 128 for i in range(max(layers - 2, 0)))][:layers]
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 264,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": min(1, layers),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "sliding_window": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "compress_ratios": ratios,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    if with_dspark:
        config["compress_ratios"] = ratios + [0] * DSPARK_STAGES
        config |= {
            "dspark_block_size": 5,
            "dspark_noise_token_id": MASK,
            "dspark_target_layer_ids": list(range(max(layers - 3, 0), layers)),
            "dspark_markov_rank": 16,
        }
    if with_mtp:
        config["compress_ratios"] = [*ratios, 0]
        config["num_nextn_predict_layers"] = 1
    return {**config, **changes}


def tensor_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Official name -> shape of every tensor, the draft's included."""
    facts = parse(config)
    draft: dict[str, Shape] = {}
    if facts.dspark is not None:
        draft = dspark_tensors(facts)
    elif facts.num_nextn_predict_layers:
        draft = mtp_tensors(facts)
    return required_tensors(facts) | draft


def random_tensors(
    config: dict[str, Any], *, seed: int = 0, mixing: float = 0.5
) -> dict[str, Tensor]:
    """A value for every tensor. mixing: size of what attention and experts add."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(config)
    values = {name: _value(name, s, config, generator, mixing) for name, s in shapes.items()}
    if "mtp.0.e_proj.weight" in values:
        _let_it_guess(values)
    return values


def _let_it_guess(values: dict[str, Tensor]) -> None:
    """Make the MTP module right now and then, as a trained one is.

    Most of what the target says follows from the last token's embedding; the module passes it on
    and speaks with the target's head.
    """
    width = values["embed.weight"].shape[1]
    values["mtp.0.e_proj.weight"] += torch.eye(width)
    for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"):
        values[f"mtp.0.{name}"] = values[name].clone()


def _value(
    name: str, shape: Shape, config: dict[str, Any], generator: torch.Generator, mixing: float
) -> Tensor:
    if name.endswith("tid2eid"):
        rows = [
            torch.randperm(config["n_routed_experts"], generator=generator)[: shape[1]]
            for _ in range(shape[0])
        ]
        return torch.stack(rows)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name in ("embed.weight", "head.weight") or name.endswith(".ape"):
        return noise
    if name.endswith("_scale"):
        return 0.7 + 0.1 * noise
    if len(shape) == 1:
        return 0.3 * noise
    size = 1.0 if "indexer" in name or "hc_" in name or "gate.weight" in name else mixing
    return noise * size / shape[-1] ** 0.5


def stored(tensors: dict[str, Tensor], quant: Quant, dtype: torch.dtype) -> dict[str, Tensor]:
    """As the files hold them: `quant` is that of the experts, fp8 of every other large matrix."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith("tid2eid"):
            out[name] = value.to(torch.int64)
        elif _kept_float32(name):
            out[name] = value.float()
        elif quant == "none" or not _quantised(name):
            out[name] = value.to(dtype)
        elif quant == "fp4" and ".experts." in name:
            packed, scale = quantise_fp4(value)
            out[name] = packed.view(torch.int8)
            out[_scale_name(name)] = scale.view(torch.float8_e8m0fnu)
        else:
            codes, scale = quantise_fp8(value)
            out[name] = codes.view(torch.float8_e4m3fn)
            out[_scale_name(name)] = scale.view(torch.float8_e8m0fnu)
    return out


def _scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"


def _kept_float32(name: str) -> bool:
    return "hc_" in name or name.endswith(("attn_sink", "gate.bias"))


def _quantised(name: str) -> bool:
    linear = (
        ".wq_a.",
        ".wq_b.",
        ".wkv.",
        ".wo_a.",
        ".wo_b.",
        ".w1.",
        ".w2.",
        ".w3.",
        "main_proj.",
        "e_proj.",
        "h_proj.",
    )
    return any(part in name for part in linear) and ".compressor." not in name


def write(
    folder: Path,
    *,
    seed: int = 0,
    mixing: float = 0.5,
    quant: Quant = "none",
    dtype: torch.dtype = torch.float32,
    layers: int = 6,
    with_dspark: bool = False,
    with_mtp: bool = False,
    **changes: Any,
) -> Path:
    """Write config.json, weights and tokenizer to `folder`; `changes` replace config fields."""
    raw = tiny_config(layers, with_dspark=with_dspark, with_mtp=with_mtp, **changes)
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    if quant != "none":
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
        raw["expert_dtype"] = quant
    tensors = stored(random_tensors(raw, seed=seed, mixing=mixing), quant, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | MARK, indent=1))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    save_tokenizer(folder, raw["vocab_size"], eos=_EOS, chat=_CHAT)
    return folder
