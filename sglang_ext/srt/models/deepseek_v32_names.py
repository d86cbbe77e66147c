"""Tensors of a DeepSeek-V3.2 checkpoint: which there must be, how large, and where each goes.

The official names are the names of our parameters, but for what is stored together here:
gate_proj and up_proj of a dense MLP, and the experts of a layer.
"""

from __future__ import annotations

import re

from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config
from sglang_ext.srt.models.placement import Placement

SCALE_SUFFIX = "_scale_inv"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MTP_ONLY = ("enorm.", "hnorm.", "eh_proj.", "embed_tokens.", "shared_head.")
_EXPERT_SHARDS = {
    "gate": ("w13_weight", "w1"),
    "up": ("w13_weight", "w3"),
    "down": ("w2_weight", "w2"),
}

Shape = tuple[int, ...]


def _attention(config: DeepseekV32Config) -> dict[str, Shape]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    index = config.index_head_dim
    return {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            config.kv_lora_rank,
        ),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
        "indexer.wq_b.weight": (config.index_n_heads * index, config.q_lora_rank),
        "indexer.wk.weight": (index, hidden),
        "indexer.k_norm.weight": (index,),
        "indexer.k_norm.bias": (index,),
        "indexer.weights_proj.weight": (config.index_n_heads, hidden),
    }


def _mlp(hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        "gate_proj.weight": (intermediate, hidden),
        "up_proj.weight": (intermediate, hidden),
        "down_proj.weight": (hidden, intermediate),
    }


def _moe(config: DeepseekV32Config) -> dict[str, Shape]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, Shape] = {
        "gate.weight": (config.n_routed_experts, hidden),
        "gate.e_score_correction_bias": (config.n_routed_experts,),
    }
    shared = _mlp(hidden, width * config.n_shared_experts)
    shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    for expert in range(config.n_routed_experts):
        shapes |= {f"experts.{expert}.{n}": s for n, s in _mlp(hidden, width).items()}
    return shapes


def layer_tensors(config: DeepseekV32Config, layer_id: int) -> dict[str, Shape]:
    """Names below `model.layers.N.` with their whole, unsharded shapes."""
    hidden = config.hidden_size
    mlp = _moe(config) if config.is_moe(layer_id) else _mlp(hidden, config.intermediate_size)
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in _attention(config).items()},
        **{f"mlp.{name}": shape for name, shape in mlp.items()},
    }


def required_tensors(config: DeepseekV32Config) -> dict[str, Shape]:
    """Every tensor the target needs, with its whole, unsharded shape."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.hidden_size,),
        "lm_head.weight": table,
    }
    for layer_id in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer_id}."
        shapes |= {prefix + n: s for n, s in layer_tensors(config, layer_id).items()}
    return shapes


def layer_of(name: str) -> int | None:
    """Number of the layer a tensor belongs to, None for one outside the layers."""
    found = _LAYER.fullmatch(name)
    return int(found[1]) if found else None


def is_mtp(name: str, config: DeepseekV32Config) -> bool:
    """Whether a tensor is one of the multi-token-prediction layers behind the target's own.

    They are recognised by name, so that a misspelt tensor of such a layer is still reported.
    """
    found = _LAYER.fullmatch(name)
    if not found:
        return False
    layer_id, rest = int(found[1]), found[2].removesuffix(SCALE_SUFFIX)
    first = config.num_hidden_layers
    if not first <= layer_id < first + config.num_nextn_predict_layers:
        return False
    return rest.startswith(_MTP_ONLY) or rest in layer_tensors(config, first)


def placement(name: str) -> Placement:
    """Where a required tensor goes."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        parameter, shard = _EXPERT_SHARDS[expert[3]]
        return Placement(f"{expert[1]}.{parameter}", shard, int(expert[2]))
    for part, index in (("gate_proj", 0), ("up_proj", 1)):
        if name.endswith(f".{part}.weight"):
            return Placement(name.replace(part, "gate_up_proj"), index)
    return Placement(name)
