"""DeepSeek-V3.2 as a model that this package serves instead of SGLang."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.srt.models.claim import Claim, not_served
from sglang_ext.srt.models.deepseek_v32_config import OFFICIAL, DeepseekV32Config, parse


def _token_size(facts: DeepseekV32Config, layers: int, dtype: torch.dtype, _page_size: int) -> int:
    from sglang_ext.srt.cache.dsa_pool import bytes_per_token

    return bytes_per_token(facts, layers, dtype)


CLAIM = Claim(
    title="DeepSeek-V3.2",
    official=OFFICIAL,
    parse=parse,
    fields=lambda hf_config, _raw: hf_config.to_dict(),
    adjust=lambda _ours, _facts: None,
    refused=not_served(
        state="index keys",
        speculation="the checkpoint's own MTP layer is not implemented; DFLASH and DSPARK are",
        quantisation="fp8 weights are widened at load",
    ),
    model="sglang_ext.srt.models.deepseek_v32:DeepseekV32ForCausalLM",
    backend="sglang_ext.srt.attention.dsa:DsaAttnBackend",
    pool="sglang_ext.srt.cache.dsa_pool:pool_class",
    token_size=_token_size,
    check="sglang_ext.srt.models.deepseek_v32_load:check",
)


def read(hf_config: Any) -> DeepseekV32Config:
    """The checkpoint's facts from the config that SGLang hands a model."""
    facts: DeepseekV32Config = CLAIM.read(hf_config)
    return facts
