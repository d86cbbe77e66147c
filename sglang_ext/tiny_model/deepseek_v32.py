"""A DeepSeek-V3.2 checkpoint of random weights, small enough for a laptop's CPU.

Official tensor names, so that SGLang, transformers and this package read the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.core.quant import quantise_fp8
from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config, parse
from sglang_ext.srt.models.deepseek_v32_names import SCALE_SUFFIX, layer_tensors, required_tensors
from sglang_ext.tiny_model.folder import MARK, WEIGHTS

# What stays unquantised in the published fp8 checkpoint.
_KEPT_WIDE = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj")


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of three layers, one of them dense, with every part of the architecture."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": changes.get("num_attention_heads", 4),
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 258,
        "torch_dtype": "float32",
        **changes,
    }


def random_tensors(config: DeepseekV32Config, *, seed: int, mixing: float) -> dict[str, Tensor]:
    """A value for every tensor of the checkpoint, MTP layers included.

    mixing: size of what attention and MLP add; 0 makes the next token a function of the last.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = required_tensors(config)
    for extra in range(config.num_nextn_predict_layers):
        layer = config.num_hidden_layers + extra
        shapes |= {f"model.layers.{layer}.{n}": s for n, s in _mtp_tensors(config).items()}
    return {name: _value(name, shape, generator, mixing) for name, shape in shapes.items()}


def _mtp_tensors(config: DeepseekV32Config) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    return {
        **layer_tensors(config, config.num_hidden_layers),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (config.vocab_size, hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (config.vocab_size, hidden),
    }


def _value(name: str, shape: tuple[int, ...], generator: torch.Generator, mixing: float) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name or "head.weight" in name:
        return noise
    if len(shape) == 1:
        return 0.1 * noise
    size = 1.0 if ".indexer." in name else mixing
    return noise * size / shape[-1] ** 0.5


def stored(
    tensors: dict[str, Tensor], *, fp8_block: tuple[int, int] | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """As the files hold them: in `dtype`, or fp8 with float32 scales where the original is."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        wide = value.dim() != 2 or any(part in name for part in _KEPT_WIDE)
        if fp8_block is None or wide:
            keep = name.endswith("e_score_correction_bias")
            out[name] = value if keep else value.to(dtype)
            continue
        codes, scale = quantise_fp8(value, block=fp8_block)
        out[name] = codes.view(torch.float8_e4m3fn)
        out[name + SCALE_SUFFIX] = torch.ldexp(torch.ones(()), scale.int() - 127)
    return out


def write(
    folder: Path,
    *,
    seed: int = 0,
    mixing: float = 0.5,
    dtype: torch.dtype = torch.float32,
    fp8_block: tuple[int, int] | None = None,
    **changes: Any,
) -> Path:
    """Write config.json and model.safetensors; `changes` replace fields of `tiny_config`.

    fp8_block: store matrices as e4m3 with one scale per block of this many rows and columns.
    """
    raw = tiny_config(**changes)
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    if fp8_block is not None:
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(fp8_block),
        }
    tensors = random_tensors(parse(raw), seed=seed, mixing=mixing)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | MARK, indent=1))
    save_file(
        stored(tensors, fp8_block=fp8_block, dtype=dtype),
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    return folder
