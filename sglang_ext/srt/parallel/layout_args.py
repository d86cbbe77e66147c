"""Parallel layouts on a CPU, checked before any rank starts: what cannot be exact is refused.

The table is core/support.py; here stands when each of its refusals applies, and the one number
that needs arithmetic: how many rows low-latency exchange must hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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

from sglang_ext.core.support import ALGORITHMS, REFUSALS
from sglang_ext.srt.models import deepseek_v4_nextn_args as nextn
from sglang_ext.srt.models.claims import claim_of

logger = logging.getLogger(__name__)
SOURCE = "sglang_ext.layout_args"
_LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


class LayoutError(ValueError):
    """A parallel layout that this device cannot serve exactly."""


def _exchanged_otherwise(c: Any) -> bool:
    return c.moe_a2a_backend not in ("none", "deepep")


def _splits_prefills(c: Any) -> bool:
    return (c.attn_cp_size or 1) > 1


def _cp_size(c: Any) -> str:
    return f"--attn-cp-size {c.attn_cp_size}"


def _overlap(c: Any) -> str:
    """The flag that overlaps batches; empty where none does."""
    found = [f"enable_{kind}_batch_overlap" for kind in ("two", "single")]
    given = [name for name in found if getattr(c, name)]
    return f"--{given[0].replace('_', '-')}" if given else ""


# refusal -> (when it applies, what was found)
_WHEN: dict[str, tuple[Callable[[Any], bool], Callable[[Any], object]]] = {
    "two-batch without exchange": (
        lambda c: c.enable_two_batch_overlap and c.moe_a2a_backend == "none",
        lambda c: f"--moe-a2a-backend {c.moe_a2a_backend}",
    ),
    "two-batch with cp": (
        lambda c: c.enable_two_batch_overlap and _splits_prefills(c),
        _cp_size,
    ),
    "two-batch with mixed chunk": (
        lambda c: c.enable_two_batch_overlap and c.enable_mixed_chunk,
        lambda c: "--enable-mixed-chunk",
    ),
    "single-batch without exchange": (
        lambda c: c.enable_single_batch_overlap and c.moe_a2a_backend == "none",
        lambda c: f"--moe-a2a-backend {c.moe_a2a_backend}",
    ),
    "single-batch with two-batch": (
        lambda c: c.enable_single_batch_overlap and c.enable_two_batch_overlap,
        lambda c: "both",
    ),
    "single-batch with cp": (
        lambda c: c.enable_single_batch_overlap and _splits_prefills(c),
        _cp_size,
    ),
    "eplb with overlap": (lambda c: c.enable_eplb and bool(_overlap(c)), _overlap),
    "eplb with cp": (lambda c: c.enable_eplb and _splits_prefills(c), _cp_size),
    "eplb with low latency": (
        lambda c: c.enable_eplb and c.moe_a2a_backend == "deepep" and c.deepep_mode != "normal",
        lambda c: f"--deepep-mode {c.deepep_mode}",
    ),
    "exchange": (_exchanged_otherwise, lambda c: c.moe_a2a_backend),
    "decode cp": (lambda c: (c.dcp_size or 1) > 1, lambda c: c.dcp_size),
    "moe dp": (lambda c: (c.moe_dp_size or 1) > 1, lambda c: c.moe_dp_size),
}


def check_layout(server_args: Any) -> None:
    """Raise LayoutError for a combination of `REFUSALS`, in its words."""
    cfg = resolving_view(server_args)
    if cfg.device != "cpu":
        return
    for name, (applies, found) in _WHEN.items():
        if applies(cfg):
            raise LayoutError(REFUSALS[name].message(found(cfg)))
    if cfg.enable_two_batch_overlap and cfg.speculative_algorithm is not None:
        _check_overlapped_speculation(server_args, str(cfg.speculative_algorithm))
    if cfg.enable_single_batch_overlap:
        _check_single_batch(server_args)
    if cfg.enable_prefill_cp:
        _check_context_parallel(server_args)


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
    running = cfg.max_running_requests
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
