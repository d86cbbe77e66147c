"""A checkpoint's config.json, as far as sizes and rules read it: every field of its type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.fields import LARGEST

# Drafts of one round; a search looks at each number up to it.
MOST_DRAFTS = 256

_SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "draft_vocab_size", "intermediate_size", "moe_intermediate_size", "max_position_embeddings",
    "head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "o_groups", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
    "sliding_window", "dspark_markov_rank",
)  # fmt: skip
_COUNTS = (
    "num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "first_k_dense_replace", "markov_rank",
)  # fmt: skip
_LISTS = ("compress_ratios", "target_layer_ids", "dspark_target_layer_ids")


def _is_whole(value: Any, least: int, most: int = LARGEST) -> bool:
    return type(value) is int and least <= value <= most


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(holds, value))


# Name -> (what it must be, the test).
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        _SIZES, (f"a whole number from 1 to {LARGEST}", lambda value: _is_whole(value, 1))
    ),
    **dict.fromkeys(
        _COUNTS, (f"a whole number from 0 to {LARGEST}", lambda value: _is_whole(value, 0))
    ),
    **dict.fromkeys(
        _LISTS,
        (
            "a list of whole numbers of at least 0",
            lambda value: _is_list(value, lambda one: _is_whole(one, 0)),
        ),
    ),
    "dspark_block_size": (
        f"a whole number from 1 to {MOST_DRAFTS}",
        lambda value: _is_whole(value, 1, MOST_DRAFTS),
    ),
    "architectures": (
        "a list of names",
        lambda value: _is_list(value, lambda one: isinstance(one, str)),
    ),
    **dict.fromkeys(
        ("torch_dtype", "dtype", "expert_dtype"),
        ("a name", lambda value: isinstance(value, str)),
    ),
    **dict.fromkeys(
        ("quantization_config", "dflash_config"),
        ("a mapping", lambda value: isinstance(value, dict)),
    ),
    "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool)),
}


class ModelConfig(dict[str, Any]):
    """The fields that are given; null is as good as left out, as Transformers has it.

    where: named in errors

    Raises:
        ConfigError: a field of another type or beyond its bounds; on access, one that is missing.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        super().__init__({name: v for name, v in config.items() if v is not None})
        self.where = where
        for name, (expected, holds) in _KINDS.items():
            if name in self and not holds(self[name]):
                raise self.error(name, expected, self[name])

    def __missing__(self, name: str) -> Any:
        raise self.error(name, "a value", "nothing", "Give the checkpoint's complete config.json.")

    def error(self, field: str, expected: str, found: object, remedy: str = "") -> ConfigError:
        remedy = remedy or "Give the checkpoint's own config.json."
        return ConfigError(self.where, field, expected=expected, found=found, remedy=remedy)
