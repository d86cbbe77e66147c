"""The models that this package serves instead of SGLang, and when."""

from __future__ import annotations

from typing import Any

from sglang_ext import env
from sglang_ext.srt.models import deepseek_v4_setup, deepseek_v32_setup, policy
from sglang_ext.srt.models.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    deepseek_v32_setup.CLAIM,
    deepseek_v4_setup.CLAIM,
    deepseek_v4_setup.MODULE,
)


def wanted() -> bool:
    """Whether SGLANG_EXT_MODELS gives these models to this package on this machine."""
    return policy.ours(env.MODELS.get(), policy.this_machine())


def offered(hf_config: Any) -> Claim | None:
    """The claim on an official checkpoint's config, where this package is to serve it."""
    claim = next((claim for claim in CLAIMS if claim.offers(hf_config)), None)
    if claim is None:
        return None
    ours = wanted()
    who = "sglang-ext" if ours else "SGLang"
    policy.say_once(claim.title, who, policy.reason(env.MODELS.get(), policy.this_machine()))
    return claim if ours else None


def claim_of(hf_config: Any) -> Claim | None:
    """The claim that holds a config, if any."""
    return next((claim for claim in CLAIMS if claim.holds(hf_config)), None)
