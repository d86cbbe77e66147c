"""DeepSeek-V4 as a model that this package serves instead of SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_ext.core.support import STREAMS_OF_STAGES
from sglang_ext.srt.models import deepseek_v4_nextn_args as nextn
from sglang_ext.srt.models.claim import Claim, Refusal, not_served
from sglang_ext.srt.models.deepseek_v4_config import (
    OFFICIAL,
    OFFICIAL_MODULE,
    DeepseekV4Config,
    parse,
)

_MORE: tuple[Refusal, ...] = (
    ("--pp-size", lambda c: (c.pp_size or 1) > 1, STREAMS_OF_STAGES),
    (
        "--attn-cp-size beside --attn-dp-size without --moe-a2a-backend",
        lambda c: (
            (c.attn_cp_size or 1) > 1
            and (c.attn_dp_size or 1) > 1
            and c.moe_a2a_backend in (None, "none")
        ),
        "rows are not gathered over both kinds of ranks at once",
    ),
)


def _adjust(ours: Any, facts: DeepseekV4Config) -> None:
    ours.head_dim = facts.head_dim
    ours.num_key_value_heads = 1
    ours.num_hidden_layers = facts.num_hidden_layers


def _token_size(facts: DeepseekV4Config, _layers: int, dtype: torch.dtype, page_size: int) -> int:
    from sglang_ext.srt.cache.dsv4_pool import bytes_per_token

    return bytes_per_token(facts, dtype, page_size)


CLAIM = Claim(
    title="DeepSeek-V4",
    official=OFFICIAL,
    parse=parse,
    fields=lambda _hf_config, raw: raw,
    adjust=_adjust,
    refused=not_served(
        state="entries",
        speculation="the checkpoint's MTP module drafts under NEXTN, every other draft under those",
        quantisation="weights are widened at load",
        algorithms=("DFLASH", "DSPARK", *nextn.ALGORITHMS),
    )
    + _MORE
    + nextn.REFUSED,
    model="sglang_ext.srt.models.deepseek_v4:DeepseekV4ForCausalLM",
    backend="sglang_ext.srt.attention.dsv4:Dsv4AttnBackend",
    pool="sglang_ext.srt.cache.dsv4_pool:pool_class",
    token_size=_token_size,
    check="sglang_ext.srt.models.deepseek_v4_load:check",
    prepare=nextn.resolve_nextn,
    handed_width=lambda facts: facts.hc_mult * facts.hidden_size,
)
# Read from the view that `nextn` makes.
MODULE = replace(
    CLAIM,
    title="DeepSeek-V4's MTP module",
    official=OFFICIAL_MODULE,
    parse=nextn.parse_module,
    check="sglang_ext.srt.models.deepseek_v4_load:check_module",
    model="sglang_ext.srt.models.deepseek_v4_nextn:DeepseekV4ForCausalLMNextN",
)


def read(hf_config: Any) -> DeepseekV4Config:
    """The checkpoint's facts from the config that SGLang hands a model."""
    facts: DeepseekV4Config = CLAIM.read(hf_config)
    return facts
