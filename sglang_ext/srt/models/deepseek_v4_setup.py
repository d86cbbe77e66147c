"""Who serves DeepSeek-V4, and what SGLang is told about it where it is us.

SGLang decides attention backend, pool, page size and K/V format by the architecture's name, and
under the official name all of them need CUDA and the published sizes. Our name is one it knows
nothing about, so it takes its generic path, and the parts it cannot guess (pool, bytes per token)
are supplied by hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.arg_groups.overrides import (
    declare_resolution,
    model_config_of,
    resolving_view,
)

from sglang_ext.srt.models.deepseek_v4_config import OFFICIAL, DeepseekV4Config, parse
from sglang_ext.srt.models.deepseek_v32_setup import wanted

ARCHITECTURE = "SglangExtDeepseekV4ForCausalLM"
SOURCE = "sglang_ext.deepseek_v4"
# The file's own fields, kept from SGLang: its layers would expect quantised weights, and its
# config class spells the rotation differently.
_FACTS = "sglang_ext_deepseek_v4"

__all__ = ["ARCHITECTURE", "claimed", "is_ours", "names_v4", "read", "resolve", "wanted"]


def is_ours(hf_config: Any) -> bool:
    """Whether a config names the architecture that this package loads."""
    return ARCHITECTURE in (getattr(hf_config, "architectures", None) or ())


def names_v4(hf_config: Any) -> bool:
    """Whether a config is that of a DeepSeek-V4 target."""
    return OFFICIAL in (getattr(hf_config, "architectures", None) or ())


def read(hf_config: Any) -> DeepseekV4Config:
    """The checkpoint's facts from a config that `claimed` returned."""
    return parse(getattr(hf_config, _FACTS))


def claimed(hf_config: Any, raw: Mapping[str, Any]) -> Any:
    """The config under our architecture's name.

    raw: config.json as the file has it, overrides from the arguments included.

    Raises:
        DeepseekV4ConfigError: a field that cannot be served as it stands.
    """
    facts = parse(raw)
    ours = copy.deepcopy(hf_config)
    ours.architectures = [ARCHITECTURE]
    setattr(ours, _FACTS, dict(raw))
    ours.quantization_config = None
    ours.head_dim = facts.head_dim
    ours.num_key_value_heads = 1
    return ours


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--kv-cache-dtype",
        lambda c: c.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
        "latents and entries are kept in the model's dtype",
    ),
    ("--quantization", lambda c: c.quantization is not None, "weights are widened at load"),
    (
        "--enable-hierarchical-cache",
        lambda c: bool(c.enable_hierarchical_cache),
        "the host cache does not know rows of this shape",
    ),
    (
        "--disaggregation-mode",
        lambda c: c.disaggregation_mode != "null",
        "latents and entries are not transferred between servers",
    ),
    ("--enable-lora", lambda c: bool(c.enable_lora or c.lora_paths), "adapters are not applied"),
    (
        "--speculative-algorithm",
        lambda c: c.speculative_algorithm not in (None, "DFLASH", "DSPARK"),
        "drafts that the checkpoint does not bundle as DSPARK are not implemented",
    ),
    (
        "--enable-two-batch-overlap",
        lambda c: bool(c.enable_two_batch_overlap),
        "the layers are not split into overlapping operations",
    ),
    ("--attn-cp-size", lambda c: (c.attn_cp_size or 1) > 1, "attention runs over whole contexts"),
    ("--pp-size", lambda c: (c.pp_size or 1) > 1, "the streams are not sent between stages"),
    (
        "--enable-dp-attention",
        lambda c: bool(c.enable_dp_attention),
        "rows are not exchanged between attention ranks around the experts",
    ),
    (
        "--moe-a2a-backend",
        lambda c: c.moe_a2a_backend not in (None, "none"),
        "it needs data-parallel attention",
    ),
)


def resolve(server_args: Any) -> None:
    """Refuse what cannot be served exactly, then name the attention backend."""
    if not is_ours(model_config_of(server_args).hf_config):
        return
    cfg = resolving_view(server_args)
    for flag, is_set, why in _REFUSED:
        if is_set(cfg):
            raise ValueError(
                f"{flag}: expected unset with DeepSeek-V4 on this package, found it set. "
                f"{why[0].upper()}{why[1:]}. Leave it out."
            )
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(cfg, field) not in (None, "portable"):
            raise ValueError(
                f"--{field.replace('_', '-')}: expected portable with DeepSeek-V4 on this "
                f"package, found {getattr(cfg, field)!r}. Leave it out."
            )
    if cfg.attention_backend is None:
        declare_resolution(server_args, SOURCE, attention_backend="portable")
