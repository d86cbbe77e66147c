"""Whose speculative worker answers for DSPARK and DFLASH (SGLANG_EXT_SPEC)."""

from __future__ import annotations

from typing import Any

from sglang_ext import env

ALGORITHMS = ("DFLASH", "DSPARK")
# What SGLang's DSPARK worker accepts beside data-parallel attention.
BUILTIN_EXCHANGES = ("none", "megamoe", "mori")


def builtin_refusal(algorithm: str, cfg: Any) -> str | None:
    """Why SGLang 0.5.23's own worker would refuse this configuration; None where it accepts."""
    if not str(cfg.device).startswith("cuda"):
        return f"it needs CUDA, and the device is {cfg.device}"
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_ext.srt.models.claims import claim_of

    claim = claim_of(model_config_of(cfg).hf_config)
    if claim is not None:
        return f"it knows {claim.title} only as SGLang serves it"
    if (cfg.attn_dp_size or 1) == 1:
        return None
    if (cfg.attn_cp_size or 1) > 1:
        return "with data-parallel attention it takes no context parallelism"
    if algorithm == "DSPARK" and cfg.moe_a2a_backend not in BUILTIN_EXCHANGES:
        return (
            f"with data-parallel attention it takes --moe-a2a-backend "
            f"{', '.join(BUILTIN_EXCHANGES)}, not {cfg.moe_a2a_backend}"
        )
    return None


def ours(algorithm: str, cfg: Any) -> bool:
    """Whether our worker runs `algorithm` under this configuration."""
    choice = env.SPEC.get()
    if algorithm not in ALGORITHMS or choice == "never":
        return False
    return choice == "always" or builtin_refusal(algorithm, cfg) is not None


def worker_class(algorithm: str) -> type | None:
    """Our worker for an algorithm, or None for those that stay SGLang's."""
    if algorithm == "DFLASH":
        from sglang_ext.srt.spec.dflash import DFlashWorker

        return DFlashWorker
    if algorithm == "DSPARK":
        from sglang_ext.srt.spec.dspark import DSparkWorker

        return DSparkWorker
    return None


def ours_for(algorithm: str, server_args: Any) -> type | None:
    """Our worker class where the policy picks it, for the hook on SGLang's factory."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return worker_class(algorithm) if ours(algorithm, resolving_view(server_args)) else None
