"""The models that this package serves instead of SGLang, and when."""

from __future__ import annotations

from typing import Any

from sglang_ext import env
from sglang_ext.srt.models import deepseek_v4_setup, deepseek_v32_setup
from sglang_ext.srt.models.claim import Claim

CLAIMS: tuple[Claim, ...] = (deepseek_v32_setup.CLAIM, deepseek_v4_setup.CLAIM)


def wanted(portable_cpu: bool) -> bool:
    """Whether SGLANG_EXT_MODELS gives these models to this package on this machine."""
    choice = env.MODELS.get()
    return choice == "always" or (choice == "auto" and portable_cpu)


def claim_of(hf_config: Any) -> Claim | None:
    """The claim that holds a config, if any."""
    return next((claim for claim in CLAIMS if claim.holds(hf_config)), None)
