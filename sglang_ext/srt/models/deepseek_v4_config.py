"""What DeepSeek-V4's config.json says, read strictly.

Two spellings are in use: the published one (`compress_ratios`, `num_hash_layers`, `rope_scaling`)
and that of transformers (`layer_types`, `mlp_layer_types`, `rope_parameters`). A file may carry
both, as long as they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.core.compress import CSA, HCA
from sglang_ext.core.yarn import Yarn
from sglang_ext.srt.models.strict_config import MISSING, OTHER_VARIANT, ConfigFieldError, Fields

OFFICIAL = "DeepseekV4ForCausalLM"
# SGLang's name for the MTP module of such a checkpoint.
OFFICIAL_MODULE = f"{OFFICIAL}NextN"
LAYER_TYPES = {
    0: "sliding_attention",
    CSA: "compressed_sparse_attention",
    HCA: "heavily_compressed_attention",
}


class DeepseekV4ConfigError(ConfigFieldError):
    """A field of config.json that cannot be served as it stands."""

    title = "DeepSeek-V4"
    compare = "Compare with the config.json of deepseek-ai/DeepSeek-V4-Flash."


@dataclass(frozen=True)
class DsparkFacts:
    """The bundled DSpark draft.

    block_size: drafted tokens a round. noise_token_id: what fills a block beyond its anchor.
    target_layer_ids: layers whose output feeds the draft. markov_rank: of its Markov head.
    stages: complete layers, named mtp.0 onwards.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    stages: int


@dataclass(frozen=True)
class DeepseekV4Config:
    """Sizes and rules of one checkpoint, under the names of the published config.json.

    compress_ratios: one per layer of the target: 0 window only, 4 CSA, 128 HCA.
    fp8_block: rows and columns that share a scale, None where nothing is quantised.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    compress_ratios: tuple[int, ...]
    fp8_block: tuple[int, int] | None
    num_nextn_predict_layers: int
    dspark: DsparkFacts | None

    @property
    def group_width(self) -> int:
        """Attention output that one group of the output projection takes in."""
        return self.num_attention_heads // self.o_groups * self.head_dim

    def is_hash(self, layer_id: int) -> bool:
        """Whether a table decides this layer's experts by token id."""
        return layer_id < self.num_hash_layers


def parse(raw: Mapping[str, Any]) -> DeepseekV4Config:
    """Read the fields of a config.json.

    Raises:
        DeepseekV4ConfigError: a field that is missing, of another type, in contradiction to
            another, or names a variant that is not computed here.
    """
    read = Fields(raw, DeepseekV4ConfigError)
    _only_what_is_computed(read)
    layers = read.integer("num_hidden_layers")
    ratios = _compress_ratios(read, layers)
    theta, compress_theta, yarn = _rope(read)
    config = DeepseekV4Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=read.integer("num_attention_heads"),
        head_dim=read.integer("head_dim", 2),
        qk_rope_head_dim=_rope_width(read),
        q_lora_rank=read.integer("q_lora_rank"),
        o_groups=read.integer("o_groups"),
        o_lora_rank=read.integer("o_lora_rank"),
        moe_intermediate_size=read.integer("moe_intermediate_size"),
        n_routed_experts=read.integer("n_routed_experts"),
        num_experts_per_tok=read.integer("num_experts_per_tok"),
        routed_scaling_factor=read.number("routed_scaling_factor"),
        num_hash_layers=_hash_layers(read, layers),
        swiglu_limit=read.number("swiglu_limit"),
        index_n_heads=read.integer("index_n_heads"),
        index_head_dim=read.integer("index_head_dim", 2),
        index_topk=read.integer("index_topk"),
        sliding_window=read.integer("sliding_window"),
        hc_mult=read.integer("hc_mult"),
        hc_sinkhorn_iters=read.integer("hc_sinkhorn_iters"),
        hc_eps=read.number("hc_eps"),
        rms_norm_eps=read.number("rms_norm_eps"),
        max_position_embeddings=read.integer("max_position_embeddings"),
        rope_theta=theta,
        compress_rope_theta=compress_theta,
        yarn=yarn,
        compress_ratios=ratios[:layers],
        fp8_block=read.fp8_block("published or a bf16"),
        num_nextn_predict_layers=read.optional("num_nextn_predict_layers", 0),
        dspark=_dspark(read, layers, len(ratios) - layers),
    )
    _check(config)
    return config


def _only_what_is_computed(read: Fields) -> None:
    read.only("hidden_act", "silu")
    read.only("scoring_func", "sqrtsoftplus")
    read.only("topk_method", "noaux_tc")
    read.only("norm_topk_prob", True)
    read.only("num_key_value_heads", 1)
    read.only("n_shared_experts", 1)
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("tie_word_embeddings", False)
    read.only("expert_dtype", None, "fp4", "fp8", "bf16")


def _rope_width(read: Fields) -> int:
    if "qk_rope_head_dim" in read.raw or "partial_rotary_factor" not in read.raw:
        return read.integer("qk_rope_head_dim", 2)
    return int(read.integer("head_dim", 2) * read.number("partial_rotary_factor"))


def _compress_ratios(read: Fields, layers: int) -> tuple[int, ...]:
    """One per layer, then one per layer of the draft where the file has them."""
    given, kinds = read.raw.get("compress_ratios"), read.raw.get("layer_types")
    from_kinds = None if kinds is None else _ratios_of(kinds, layers)
    _check_rates(read)
    if given is None:
        if from_kinds is None:
            raise DeepseekV4ConfigError(
                "compress_ratios", expected="one of 0, 4, 128 per layer", found=MISSING
            )
        return from_kinds
    ratios = tuple(given) if isinstance(given, list | tuple) else ()
    if len(ratios) < layers or any(type(r) is not int or r not in LAYER_TYPES for r in ratios):
        raise DeepseekV4ConfigError(
            "compress_ratios",
            expected=f"one of 0, 4, 128 for each of num_hidden_layers = {layers} layers",
            found=given,
        )
    if any(ratios[layers:]):
        raise DeepseekV4ConfigError(
            "compress_ratios",
            expected=f"0 for what follows the first {layers}, the layers of a draft",
            found=given,
        )
    if from_kinds is not None and from_kinds != ratios[:layers]:
        raise DeepseekV4ConfigError(
            "compress_ratios", expected=f"{list(from_kinds)}, as layer_types says", found=given
        )
    return ratios


def _ratios_of(kinds: Any, layers: int) -> tuple[int, ...]:
    by_name = {name: ratio for ratio, name in LAYER_TYPES.items()}
    names = list(kinds) if isinstance(kinds, list | tuple) else []
    if len(names) != layers or any(not isinstance(n, str) or n not in by_name for n in names):
        raise DeepseekV4ConfigError(
            "layer_types", expected=f"{layers} of {', '.join(by_name)}", found=kinds
        )
    return tuple(by_name[n] for n in names)


def _check_rates(read: Fields) -> None:
    rates = read.raw.get("compress_rates")
    expected = {LAYER_TYPES[CSA]: CSA, LAYER_TYPES[HCA]: HCA}
    if rates is not None and rates != expected:
        raise DeepseekV4ConfigError(
            "compress_rates", expected=repr(expected), found=rates, remedy=OTHER_VARIANT
        )


def _hash_layers(read: Fields, layers: int) -> int:
    kinds = read.raw.get("mlp_layer_types")
    if kinds is None:
        return min(read.integer("num_hash_layers", 0), layers)
    named = isinstance(kinds, list | tuple)
    count = sum(kind == "hash_moe" for kind in kinds) if named else 0
    if not named or list(kinds) != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise DeepseekV4ConfigError(
            "mlp_layer_types", expected=f"hash_moe, then moe, {layers} in all", found=kinds
        )
    given = read.optional("num_hash_layers", count)
    if min(given, layers) != count:
        raise DeepseekV4ConfigError(
            "num_hash_layers", expected=f"{count}, as mlp_layer_types says", found=given
        )
    return count


def _rope(read: Fields) -> tuple[float, float, Yarn | None]:
    """(theta of window layers, theta of compressed layers, their YaRN)."""
    _same_width(read, read.raw)
    name = "rope_parameters"
    nested = read.record(name, read.raw.get(name))
    if nested:
        main, compress = (
            read.record(f"{name}.{kind}", nested.get(kind)) for kind in ("main", "compress")
        )
        if main.get("rope_type", "default") != "default":
            raise DeepseekV4ConfigError(
                "rope_parameters.main.rope_type",
                expected="default",
                found=main,
                remedy=OTHER_VARIANT,
            )
        _same_width(read, main, compress)
        theta = read.positive(f"{name}.main.rope_theta", main.get("rope_theta", MISSING))
        name = f"{name}.compress"
        compress_theta = read.positive(f"{name}.rope_theta", compress.get("rope_theta", MISSING))
        yarn = _yarn(read, name, _with_factor(compress))
        _same_yarn(read, yarn)
        return theta, compress_theta, yarn
    yarn = _yarn(read, "rope_scaling", read.record("rope_scaling", read.raw.get("rope_scaling")))
    return read.number("rope_theta"), read.number("compress_rope_theta"), yarn


def _same_yarn(read: Fields, yarn: Yarn | None) -> None:
    """rope_scaling beside rope_parameters must say the same.

    rope_theta and compress_rope_theta need not: transformers writes its defaults there.
    """
    name, scaling = "rope_scaling", read.raw.get("rope_scaling")
    if scaling is not None and _yarn(read, name, read.record(name, scaling)) != yarn:
        raise DeepseekV4ConfigError(
            name, expected="what rope_parameters.compress says", found=scaling
        )


def _same_width(read: Fields, *parts: Mapping[str, Any]) -> None:
    """transformers takes the width of a rotation from its own fields, not from the others."""
    rope, dim = _rope_width(read), read.integer("head_dim", 2)
    for part in parts:
        share = part.get("partial_rotary_factor")
        if share is None:
            continue
        if int(dim * read.positive("partial_rotary_factor", share)) != rope:
            raise DeepseekV4ConfigError(
                "partial_rotary_factor",
                expected=f"{rope / dim}, qk_rope_head_dim {rope} over head_dim {dim}",
                found=share,
            )


def _with_factor(compress: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers multiplies the rotation of its own spelling by a derived factor unless told."""
    mscale, all_dim = (compress.get(key) for key in ("mscale", "mscale_all_dim"))
    if compress.get("attention_factor") is not None or (mscale and mscale == all_dim):
        return compress
    return {**compress, "attention_factor": "none, which transformers takes for 0.1 ln(factor) + 1"}


def _yarn(read: Fields, name: str, scaling: Mapping[str, Any]) -> Yarn | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise DeepseekV4ConfigError(f"{name}.rope_type", expected="default or yarn", found=kind)
    odd = scaling.get("attention_factor", 1.0) not in (None, 1.0)
    if odd or scaling.get("truncate") is False:
        raise DeepseekV4ConfigError(
            name, expected="yarn with attention_factor 1 and truncation", found=dict(scaling)
        )
    length = scaling.get("original_max_position_embeddings", MISSING)
    return Yarn(
        factor=read.positive(f"{name}.factor", scaling.get("factor", MISSING)),
        original_length=int(read.positive(f"{name}.original_max_position_embeddings", length)),
        beta_fast=read.positive(f"{name}.beta_fast", scaling.get("beta_fast") or 32),
        beta_slow=read.positive(f"{name}.beta_slow", scaling.get("beta_slow") or 1),
    )


def _dspark(read: Fields, layers: int, extra: int) -> DsparkFacts | None:
    if "dspark_block_size" not in read.raw:
        return None
    ids = read.raw.get("dspark_target_layer_ids")
    known = isinstance(ids, list | tuple) and bool(ids)
    if not known or any(type(i) is not int or not 0 <= i < layers for i in ids or ()):
        raise DeepseekV4ConfigError(
            "dspark_target_layer_ids", expected=f"layers 0 to {layers - 1}", found=ids
        )
    if extra < 1:
        raise DeepseekV4ConfigError(
            "compress_ratios",
            expected="a trailing 0 for each stage of the bundled DSpark draft",
            found=read.raw.get("compress_ratios"),
        )
    noise, vocab = read.integer("dspark_noise_token_id", 0), read.integer("vocab_size")
    if noise >= vocab:
        raise DeepseekV4ConfigError(
            "dspark_noise_token_id", expected=f"below vocab_size {vocab}", found=noise
        )
    return DsparkFacts(
        block_size=read.integer("dspark_block_size"),
        noise_token_id=noise,
        target_layer_ids=tuple(ids or ()),
        markov_rank=read.integer("dspark_markov_rank"),
        stages=extra,
    )


def _check(config: DeepseekV4Config) -> None:
    narrow = min(config.head_dim, config.index_head_dim)
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > narrow:
        raise DeepseekV4ConfigError(
            "qk_rope_head_dim",
            expected=f"an even number up to head_dim and index_head_dim, {narrow}",
            found=config.qk_rope_head_dim,
        )
    if config.num_attention_heads % config.o_groups:
        raise DeepseekV4ConfigError(
            "o_groups",
            expected=f"a divisor of num_attention_heads {config.num_attention_heads}",
            found=config.o_groups,
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise DeepseekV4ConfigError(
            "num_experts_per_tok",
            expected=f"at most n_routed_experts {config.n_routed_experts}",
            found=config.num_experts_per_tok,
        )
