"""Parallel layouts on a CPU, checked before any rank starts: what cannot be exact is refused.

The table is core/refusals.py; here stand the refusals that depend on the model, and the one number
that needs arithmetic: how many rows low-latency exchange must hold.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs

from sglang_ext.core.refusals import REFUSALS, LayoutFlags, refused
from sglang_ext.core.support import ALGORITHMS
from sglang_ext.srt.models import deepseek_v4_nextn_args as nextn
from sglang_ext.srt.models.claims import claim_of

logger = logging.getLogger(__name__)
SOURCE = "sglang_ext.layout_args"
_LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


class LayoutError(ValueError):
    """A parallel layout that this device cannot serve exactly."""


def check_layout(server_args: Any) -> None:
    """Raise LayoutError for a combination of `REFUSALS`, in its words."""
    cfg = resolving_view(server_args)
    if cfg.device != "cpu":
        return
    for refusal, found in refused(_flags(cfg)):
        raise LayoutError(refusal.message(found))
    if cfg.enable_two_batch_overlap and cfg.speculative_algorithm is not None:
        _check_overlapped_speculation(server_args, str(cfg.speculative_algorithm))
    if cfg.enable_single_batch_overlap:
        _check_single_batch(server_args)
    if cfg.enable_prefill_cp:
        _check_context_parallel(server_args)


def _flags(cfg: Any) -> LayoutFlags:
    """SGLang leaves some sizes unset where they are 1."""
    names = (field.name for field in fields(LayoutFlags))
    return LayoutFlags(**{n: v for n in names if (v := getattr(cfg, n)) is not None})


def _check_overlapped_speculation(server_args: Any, algorithm: str) -> None:
    config = model_config_of(server_args).hf_config
    model = config.architectures[0]
    ours = claim_of(config) is not None
    cut = ours or (model == "Qwen3MoeForCausalLM" and algorithm not in nextn.ALGORITHMS)
    if algorithm not in (*ALGORITHMS, *nextn.ALGORITHMS) or not cut:
        raise LayoutError(REFUSALS["two-batch with speculation"].message(f"{algorithm} on {model}"))


def _check_single_batch(server_args: Any) -> None:
    config = model_config_of(server_args).hf_config
    model = config.architectures[0]
    if model != "Qwen3MoeForCausalLM" and claim_of(config) is None:
        raise LayoutError(REFUSALS["single-batch of other models"].message(model))


def _check_context_parallel(server_args: Any) -> None:
    backend, _ = attention_backends_of(resolved_view(server_args))
    latent = model_config_of(server_args).attention_arch is AttentionArch.MLA
    if backend != "portable" or latent:
        found = f"{backend!r} over {'latent' if latent else 'plain'} K/V"
        raise LayoutError(REFUSALS["cp backend"].message(found))


def check_exchange_limit(server_args: Any) -> None:
    """Hold the rows a rank may send at once to the limit of low-latency exchange.

    A running request sends one row per step, or its anchor and drafts. Where the user gave no
    number of running requests, the largest that fits is taken.

    Raises:
        LayoutError: rows beyond the limit, with the three numbers that make it.
    """
    cfg = resolving_view(server_args)
    if cfg.device != "cpu" or cfg.moe_a2a_backend != "deepep" or cfg.deepep_mode == "normal":
        return
    limit = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
    width = cfg.speculative_num_draft_tokens or 1
    ranks = cfg.attn_dp_size or 1
    most = limit // width * ranks
    # As the user left it: by now SGLang has put a number of its own beside speculation.
    running = server_args._raw_input["max_running_requests"]
    if most < 1 or (running is not None and running > most):
        raise LayoutError(
            f"--max-running-requests: expected at most {most} with low-latency exchange "
            f"({_LIMIT} {limit} / {width} rows per request x {ranks} DP ranks), found {running}. "
            f"Lower it, raise {_LIMIT}, or use --deepep-mode normal."
        )
    if running is None:
        declare_resolution(server_args, SOURCE, max_running_requests=most)
        logger.info("--max-running-requests %d: what low-latency exchange can hold", most)
    chunk = cfg.chunked_prefill_size
    if cfg.deepep_mode == "low_latency" and not 0 < (chunk or 0) <= limit:
        raise LayoutError(
            f"--chunked-prefill-size: expected 1 to {limit * ranks} with --deepep-mode "
            f"low_latency ({_LIMIT} {limit} x {ranks} DP ranks), found "
            f"{chunk and chunk * ranks}. Lower it, raise {_LIMIT}, or use --deepep-mode auto."
        )
