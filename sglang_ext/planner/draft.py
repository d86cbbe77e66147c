"""Sizes of a draft: its weights, its KV per token, and what one round of drafting reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.launcher.catalog import Draft, Model
from sglang_ext.launcher.model_config import ModelConfig
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.shape import BF16, V4_ENTRY, Shape, head_width, kv_heads


@dataclass(frozen=True)
class DraftShape:
    """A draft beside a target.

    gamma: tokens drafted per round; shared, routed: bytes of weights outside and inside experts
    whole: bytes of the shared ones that tensor parallelism does not split
    kv_token, kv_request: bytes per token, and per request whatever its length
    row_params: parameters that one drafted row passes through
    serial: bytes read at each of the gamma steps of the Markov loop
    experts, top_k: of its mixture layers, 0 without
    """

    gamma: int
    shared: float
    whole: float
    routed: float
    kv_token: float
    kv_shards: int
    kv_request: float
    row_params: float
    serial: float
    experts: int = 0
    top_k: int = 0

    def shared_per_rank(self, attn_tp: int) -> float:
        """Bytes of weights outside the experts on one of `attn_tp` ranks."""
        return self.whole + (self.shared - self.whole) / attn_tp


def draft_of(model: Model, shape: Shape, layout: Layout) -> DraftShape | None:
    """The draft that a layout runs, None without one."""
    if not layout.algorithm:
        return None
    return read_draft(model.drafts[layout.algorithm], model.config, shape)


def read_draft(draft: Draft, target: Mapping[str, Any], shape: Shape) -> DraftShape:
    """The sizes of a model's own draft (in its checkpoint) or of a dense one."""
    if draft.config:
        return _dense(draft, ModelConfig(draft.config, f"{draft.algorithm} draft"))
    return _in_checkpoint(draft, ModelConfig(target, "config.json"), shape)


def _in_checkpoint(draft: Draft, target: ModelConfig, shape: Shape) -> DraftShape:
    stages = len(target["dspark_target_layer_ids"])
    rank = target["dspark_markov_rank"]
    window = next((k for k in shape.kinds if k.name == "window"), shape.kinds[0])
    markov = 2.0 * shape.vocab * rank * BF16
    shared = stages * (window.params + shape.shared_params) * shape.linear
    features = shape.hidden * shape.hidden
    shared += stages * features * shape.linear + markov
    routed = stages * shape.experts * shape.expert_params * shape.expert
    row = window.params + shape.shared_params + shape.top_k * shape.expert_params
    return DraftShape(
        gamma=draft.gamma,
        shared=shared,
        whole=stages * (window.whole + features) * shape.linear + markov,
        routed=routed,
        kv_token=0.0,
        kv_shards=1,
        kv_request=stages * target["sliding_window"] * V4_ENTRY,
        row_params=stages * row,
        serial=shape.vocab * rank * BF16,
        experts=shape.experts,
        top_k=shape.top_k,
    )


def _dense(draft: Draft, config: ModelConfig) -> DraftShape:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dim, kv, heads = head_width(config), kv_heads(config), config["num_attention_heads"]
    layer = hidden * dim * (2 * heads + 2 * kv) + 3.0 * hidden * config["intermediate_size"]
    nested = ModelConfig(config.get("dflash_config", {}), f"{config.where}, dflash_config")
    ids = config.get("target_layer_ids") or nested["target_layer_ids"]
    vocab = config.get("draft_vocab_size", config["vocab_size"])
    rank = config.get("markov_rank", 0)
    features = len(ids) * hidden * hidden
    row = layers * layer + features
    tables = (config["vocab_size"] + vocab) * rank
    return DraftShape(
        gamma=draft.gamma,
        shared=(row + tables) * BF16,
        whole=(features + tables) * BF16,
        routed=0.0,
        kv_token=layers * 2 * kv * dim * BF16,
        kv_shards=kv,
        kv_request=0.0,
        row_params=row,
        serial=vocab * rank * BF16,
    )
