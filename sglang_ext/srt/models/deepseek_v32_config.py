"""What DeepSeek-V3.2's config.json says, read strictly.

Two spellings of rotary settings are in use: `rope_theta` beside `rope_scaling` in the published
checkpoints, one `rope_parameters` object in those that transformers 5 writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.srt.models.strict_config import MISSING, ConfigFieldError, Fields

OFFICIAL = "DeepseekV32ForCausalLM"


class DeepseekV32ConfigError(ConfigFieldError):
    """A field of config.json that cannot be served as it stands."""

    title = "DeepSeek-V3.2"
    compare = "Compare with the config.json of deepseek-ai/DeepSeek-V3.2."


@dataclass(frozen=True)
class Rope:
    """Rotary settings; `factor` is 1 without YaRN.

    attention_scale: what YaRN multiplies the softmax scale by (mscale_all_dim squared).
    """

    theta: float
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def yarn(self) -> bool:
        return self.factor > 1.0

    @property
    def attention_scale(self) -> float:
        if not self.yarn or not self.mscale_all_dim:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2


@dataclass(frozen=True)
class DeepseekV32Config:
    """Sizes and rules of one checkpoint, under the names of the official config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    fp8_block: tuple[int, int] | None

    @property
    def qk_head_dim(self) -> int:
        """Query and key width of one head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of what the cache keeps per token: the latent, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.attention_scale

    def is_moe(self, layer_id: int) -> bool:
        return layer_id >= self.first_k_dense_replace


def parse(raw: Mapping[str, Any]) -> DeepseekV32Config:
    """Read the fields of a config.json.

    Raises:
        DeepseekV32ConfigError: a field that is missing, of another type, or names a variant that
            is not computed here.
    """
    read = Fields(raw, DeepseekV32ConfigError)
    read.only("hidden_act", "silu")
    read.only("scoring_func", "sigmoid")
    read.only("topk_method", "noaux_tc")
    read.only("attention_bias", False)
    read.only("tie_word_embeddings", False)
    read.only("moe_layer_freq", 1)
    config = DeepseekV32Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        moe_intermediate_size=read.integer("moe_intermediate_size"),
        num_hidden_layers=read.integer("num_hidden_layers"),
        num_nextn_predict_layers=read.optional("num_nextn_predict_layers", 0),
        num_attention_heads=read.integer("num_attention_heads"),
        q_lora_rank=read.integer("q_lora_rank"),
        kv_lora_rank=read.integer("kv_lora_rank"),
        qk_nope_head_dim=read.integer("qk_nope_head_dim"),
        qk_rope_head_dim=read.integer("qk_rope_head_dim", 2),
        v_head_dim=read.integer("v_head_dim"),
        n_routed_experts=read.integer("n_routed_experts"),
        n_shared_experts=read.integer("n_shared_experts"),
        num_experts_per_tok=read.integer("num_experts_per_tok"),
        n_group=read.integer("n_group"),
        topk_group=read.integer("topk_group"),
        routed_scaling_factor=read.number("routed_scaling_factor"),
        norm_topk_prob=read.flag("norm_topk_prob"),
        first_k_dense_replace=read.integer("first_k_dense_replace", 0),
        index_n_heads=read.integer("index_n_heads"),
        index_head_dim=read.integer("index_head_dim", 2),
        index_topk=read.integer("index_topk"),
        max_position_embeddings=read.integer("max_position_embeddings"),
        rms_norm_eps=read.number("rms_norm_eps"),
        rope=_rope(read),
        fp8_block=read.fp8_block("bf16 or the fp8"),
    )
    _check(config, raw)
    return config


def _check(config: DeepseekV32Config, raw: Mapping[str, Any]) -> None:
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > config.index_head_dim:
        raise DeepseekV32ConfigError(
            "qk_rope_head_dim",
            expected=f"an even number up to index_head_dim {config.index_head_dim}",
            found=config.qk_rope_head_dim,
        )
    groups, chosen = config.n_group, config.topk_group
    per_group = config.n_routed_experts // groups
    if config.n_routed_experts % groups or per_group < 2:
        raise DeepseekV32ConfigError(
            "n_group",
            expected=f"a divisor of n_routed_experts {config.n_routed_experts} that leaves at "
            f"least 2 experts per group",
            found=groups,
        )
    if chosen > groups or config.num_experts_per_tok > chosen * per_group:
        raise DeepseekV32ConfigError(
            "topk_group",
            expected=f"at most n_group {groups}, with room for num_experts_per_tok "
            f"{config.num_experts_per_tok}",
            found=chosen,
        )
    kinds = raw.get("mlp_layer_types")
    expected = ["sparse" if config.is_moe(i) else "dense" for i in range(config.num_hidden_layers)]
    if kinds is not None and kinds != expected:
        raise DeepseekV32ConfigError(
            "mlp_layer_types",
            expected=f"{config.first_k_dense_replace} dense layers, then sparse ones, as "
            f"first_k_dense_replace says",
            found=kinds,
        )


def _rope(read: Fields) -> Rope:
    parameters = read.raw.get("rope_parameters")
    if parameters is None:
        name = "rope_scaling"
        theta, scaling = read.number("rope_theta"), read.record(name, read.raw.get(name))
    else:
        name = "rope_parameters"
        scaling = read.record(name, parameters)
        theta = read.positive(
            f"{name}.rope_theta", scaling.get("rope_theta", read.get("rope_theta"))
        )
    if scaling.get("partial_rotary_factor", 1) not in (None, 1):
        raise DeepseekV32ConfigError(
            f"{name}.partial_rotary_factor",
            expected="1: qk_rope_head_dim is rotated as a whole",
            found=scaling["partial_rotary_factor"],
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise DeepseekV32ConfigError(f"{name}.rope_type", expected="default or yarn", found=kind)
    if scaling.get("attention_factor") is not None or scaling.get("truncate") is False:
        raise DeepseekV32ConfigError(
            name, expected="yarn without attention_factor and truncate", found=dict(scaling)
        )
    length = scaling.get("original_max_position_embeddings", MISSING)
    return Rope(
        theta=theta,
        factor=read.positive(f"{name}.factor", scaling.get("factor", MISSING)),
        original_length=int(read.positive(f"{name}.original_max_position_embeddings", length)),
        beta_fast=read.positive(f"{name}.beta_fast", scaling.get("beta_fast") or 32),
        beta_slow=read.positive(f"{name}.beta_slow", scaling.get("beta_slow") or 1),
        mscale=read.positive(f"{name}.mscale", scaling.get("mscale") or 1.0),
        mscale_all_dim=_all_dim(read, name, scaling),
    )


def _all_dim(read: Fields, name: str, scaling: Mapping[str, Any]) -> float:
    value = scaling.get("mscale_all_dim")
    return read.positive(f"{name}.mscale_all_dim", value) if value else 0.0
