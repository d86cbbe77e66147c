"""A model's sizes out of its config.json: parameters, KV bytes, attention work per layer kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.launcher.model_config import ModelConfig

BF16 = 2.0
FP8 = 1.0 + 4 / (128 * 128)  # one fp32 scale per 128 x 128 block
FP4 = 0.5 + 1 / 32  # one e8m0 scale per 32 values

# SGLang 0.5.23's packed rows: 448 fp8 + 64 bf16 + 7 scales + pad; an fp8 key of 128 and its scale.
V4_ENTRY, INDEX_ENTRY = 584.0, 132.0
V4_RATIOS = (0, 4, 128)  # of compression: window, CSA and HCA layers
V4_WINDOW_SHARE = 0.1  # SGLang keeps window rows for a tenth of the tokens (swa_full_tokens_ratio)


@dataclass(frozen=True)
class Indexer:
    """What chooses a layer's keys; its parameters and bytes are counted in its LayerKind too.

    params: parameters; kv_token, kv_request: bytes kept per token, and per request
    flops: FLOP per query token and token of context
    """

    params: float
    kv_token: float
    flops: float
    kv_request: float = 0.0


@dataclass(frozen=True)
class LayerKind:
    """Layers that attend alike.

    count: how many; params: attention's parameters per layer
    whole: its part of params that tensor parallelism does not split
    kv_token: bytes kept per token and layer; kv_shards: ranks that can share them out
    kv_request: bytes kept per request and layer whatever its length
    indexer: its part of params, kv_token and kv_request, None without
    flops: context -> FLOP per query token and layer, the indexer's left out
    reads: context -> bytes per sequence and layer
    """

    name: str
    count: int
    params: float
    kv_token: float
    kv_shards: int
    flops: Callable[[float], float]
    reads: Callable[[float], float]
    whole: float = 0.0
    kv_request: float = 0.0
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Shape:
    """What memory and time are computed from.

    linear, expert: bytes per parameter; dense: parameters of a dense layer's MLP
    expert_params: of one routed expert; shared_params: of the shared one, per layer
    """

    family: str
    hidden: int
    vocab: int
    heads: int
    kinds: tuple[LayerKind, ...]
    dense_layers: int
    dense: float
    moe_layers: int
    experts: int
    top_k: int
    expert_params: float
    shared_params: float
    linear: float
    expert: float
    tied: bool
    longest: int

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def attention_params(self) -> float:
        return sum(kind.count * kind.params for kind in self.kinds)

    @property
    def indexer_params(self) -> float:
        """Of attention's parameters, the indexers'. No rank holds less than all of them."""
        return sum(k.count * k.indexer.params for k in self.kinds if k.indexer)

    def attention_per_rank(self, attn_tp: int) -> float:
        """Attention's parameters on one of `attn_tp` ranks."""
        whole = sum(kind.count * kind.whole for kind in self.kinds)
        return whole + (self.attention_params - whole) / attn_tp

    def pair_flops(self, context: float, attn_tp: int) -> float:
        """FLOP of scores and values of all layers for one query token, on one rank.

        Attention's heads are split over ranks; the indexer's are not.
        """
        heads = sum(k.count * k.flops(context) for k in self.kinds) / attn_tp
        return heads + sum(k.count * k.indexer.flops * context for k in self.kinds if k.indexer)

    @property
    def head_params(self) -> float:
        """Embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def params(self) -> float:
        """All parameters, norms and routers left out."""
        moe = self.moe_layers * (self.experts * self.expert_params + self.shared_params)
        return self.attention_params + self.dense_layers * self.dense + moe + self.head_params

    @property
    def active_params(self) -> float:
        """Parameters that one token passes through, embedding left out."""
        moe = self.moe_layers * (self.top_k * self.expert_params + self.shared_params)
        head = self.vocab * self.hidden
        return self.attention_params + self.dense_layers * self.dense + moe + head

    @property
    def kv_token(self) -> float:
        """Bytes kept per token over all layers, before any sharing out."""
        return sum(kind.count * kind.kv_token for kind in self.kinds)

    @property
    def expert_dtype(self) -> str:
        return {FP4: "fp4", FP8: "fp8"}.get(self.expert, "bf16")


def read_shape(config: Mapping[str, Any], where: str = "config.json") -> Shape:
    """Raises ConfigError for an architecture or a field that the planner does not know."""
    given = ModelConfig(config, where)
    name = given["architectures"][0]
    for prefix, reader in _READERS.items():
        if name.startswith(prefix):
            return reader(given)
    raise given.error(
        "architectures",
        f"one that starts with {', '.join(_READERS)}",
        name,
        "The planner has no sizes for it.",
    )


def _linear_bytes(config: ModelConfig) -> float:
    quant = config.get("quantization_config")
    if quant is None:
        # Transformers 5 writes `dtype`.
        stored = config.get("dtype", config.get("torch_dtype"))
        return 4.0 if stored == "float32" else BF16
    if (method := quant.get("quant_method")) != "fp8":
        known = "The planner has no sizes for it."
        raise config.error("quantization_config.quant_method", "fp8", method, known)
    return FP8


def head_width(config: ModelConfig) -> int:
    """Given, or the width over the heads."""
    if "head_dim" in config:
        return int(config["head_dim"])
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden < heads:
        raise config.error("hidden_size", f"at least one column for each of {heads} heads", hidden)
    return int(hidden // heads)


def kv_heads(config: ModelConfig) -> int:
    """Given, or as many as there are heads."""
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads)
    if heads % kv:
        raise config.error("num_key_value_heads", f"a divisor of the {heads} heads", kv)
    return int(kv)


def _active_experts(config: ModelConfig, experts: int) -> int:
    active = config["num_experts_per_tok"]
    if not 1 <= active <= experts:
        raise config.error("num_experts_per_tok", f"1 to {experts}, the experts there are", active)
    return int(active)


def _grouped_query(config: ModelConfig) -> LayerKind:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim, kv = head_width(config), kv_heads(config)
    row = 2 * kv * dim * BF16
    return LayerKind(
        name="full attention",
        count=config["num_hidden_layers"],
        params=hidden * dim * (2 * heads + 2 * kv),
        kv_token=row,
        kv_shards=kv,
        flops=lambda n: 4.0 * heads * dim * n,
        reads=lambda n: row * n,
    )


def _dense(config: ModelConfig) -> Shape:
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    layers = config["num_hidden_layers"]
    linear = _linear_bytes(config)
    return Shape(
        family="moe" if experts else "dense",
        hidden=hidden,
        vocab=config["vocab_size"],
        heads=config["num_attention_heads"],
        kinds=(_grouped_query(config),),
        dense_layers=0 if experts else layers,
        dense=3.0 * hidden * config["intermediate_size"],
        moe_layers=layers if experts else 0,
        experts=experts,
        top_k=_active_experts(config, experts) if experts else 0,
        expert_params=3.0 * hidden * config["moe_intermediate_size"] if experts else 0.0,
        shared_params=0.0,
        linear=linear,
        expert=linear,
        tied=config.get("tie_word_embeddings", False),
        longest=config["max_position_embeddings"],
    )


def _v32(config: ModelConfig) -> Shape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value, rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    ih, idim, topk = config["index_n_heads"], config["index_head_dim"], config["index_topk"]
    attention = hidden * rank + rank * heads * (nope + rope) + hidden * (latent + rope)
    attention += latent * heads * (nope + value) + heads * value * hidden
    indexer = rank * ih * idim + hidden * (idim + ih)
    row = (latent + rope) * BF16
    pair = 2.0 * heads * (2 * latent + rope)  # absorbed: scores over latent + rope, values latent
    kind = LayerKind(
        name="MLA with indexer",
        count=config["num_hidden_layers"],
        params=attention + indexer,
        kv_token=row + INDEX_ENTRY,
        kv_shards=1,
        flops=lambda n: min(n, topk) * pair,
        reads=lambda n: min(n, topk) * row + n * INDEX_ENTRY,
        whole=hidden * (rank + latent + rope) + indexer,
        indexer=Indexer(indexer, INDEX_ENTRY, 2.0 * ih * idim),
    )
    dense, experts = config["first_k_dense_replace"], config["n_routed_experts"]
    if dense > kind.count:
        raise config.error("first_k_dense_replace", f"at most the {kind.count} layers", dense)
    expert = 3.0 * hidden * config["moe_intermediate_size"]
    linear = _linear_bytes(config)
    return Shape(
        family="v32",
        hidden=hidden,
        vocab=config["vocab_size"],
        heads=heads,
        kinds=(kind,),
        dense_layers=dense,
        dense=3.0 * hidden * config["intermediate_size"],
        moe_layers=kind.count - dense,
        experts=experts,
        top_k=_active_experts(config, experts),
        expert_params=expert,
        shared_params=expert * config["n_shared_experts"],
        linear=linear,
        expert=linear,
        tied=False,
        longest=config["max_position_embeddings"],
    )


def _v4(config: ModelConfig) -> Shape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    layers, ratios = config["num_hidden_layers"], config["compress_ratios"]
    if len(ratios) < layers or not set(ratios) <= set(V4_RATIOS):
        raise config.error("compress_ratios", f"0, 4 or 128 for each of {layers} layers", ratios)
    experts = config["n_routed_experts"]
    expert = 3.0 * hidden * config["moe_intermediate_size"]
    linear = _linear_bytes(config)
    return Shape(
        family="v4",
        hidden=hidden,
        vocab=config["vocab_size"],
        heads=heads,
        kinds=tuple(k for k in (_v4_kind(config, ratio) for ratio in V4_RATIOS) if k.count),
        dense_layers=0,
        dense=0.0,
        moe_layers=layers,
        experts=experts,
        top_k=_active_experts(config, experts),
        expert_params=expert,
        shared_params=expert * config["n_shared_experts"],
        linear=linear,
        expert=FP4 if config.get("expert_dtype") == "fp4" else linear,
        tied=False,
        longest=config["max_position_embeddings"],
    )


def _v4_kind(config: ModelConfig, ratio: int) -> LayerKind:
    """Window (ratio 0), CSA (4) or HCA (128) layers of DeepSeek-V4."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    rank, out, groups = config["q_lora_rank"], config["o_lora_rank"], config["o_groups"]
    ih, idim, topk = config["index_n_heads"], config["index_head_dim"], config["index_topk"]
    window = config["sliding_window"]
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    params = float(hidden * rank + rank * heads * dim + hidden * dim + out * heads * dim)
    params += groups * out * hidden
    pair = 4.0 * heads * dim
    compressed = {0: 0.0, 4: V4_ENTRY / 4, 128: V4_ENTRY / 128}[ratio]
    # Raw fp32 inputs of the compressors (kv and gate), in rings doubled for speculation.
    ring = {0: 0.0, 4: 16 * 4.0 * (4 * dim + 4 * idim), 128: 256 * 4.0 * 2 * dim}[ratio]

    def keys(n: float) -> float:
        chosen = {0: 0.0, 4: min(n / 4, topk), 128: n / 128}[ratio]
        return min(n, window) + chosen

    scored = {0: 0.0, 4: 0.25, 128: 0.0}[ratio]
    whole = float(hidden * (rank + dim))
    indexer = None
    if ratio == 4:
        own = float(rank * ih * idim + hidden * (4 * idim + ih))
        flops = scored * 2.0 * ih * idim
        indexer = Indexer(own, scored * INDEX_ENTRY, flops, 16 * 4.0 * 4 * idim)
    compressor = {0: 0.0, 4: 4.0 * hidden * dim, 128: 2.0 * hidden * dim}[ratio]
    added = compressor + (indexer.params if indexer else 0.0)
    params, whole = params + added, whole + added
    return LayerKind(
        name={0: "window", 4: "CSA", 128: "HCA"}[ratio],
        count=ratios.count(ratio),
        params=params,
        kv_token=V4_ENTRY * V4_WINDOW_SHARE + compressed + scored * INDEX_ENTRY,
        kv_shards=1,
        flops=lambda n: keys(n) * pair,
        reads=lambda n: keys(n) * V4_ENTRY + scored * n * INDEX_ENTRY,
        whole=whole,
        kv_request=ring,
        indexer=indexer,
    )


_READERS: dict[str, Callable[[ModelConfig], Shape]] = {
    "DeepseekV4": _v4,
    "DeepseekV32": _v32,
    "Qwen2For": _dense,
    "Qwen3For": _dense,
    "Qwen3Moe": _dense,
    "LlamaFor": _dense,
}
