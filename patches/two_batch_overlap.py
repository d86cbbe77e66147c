"""`--enable-two-batch-overlap` without CUDA: prefill schedules that ask for no SM count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.batch_overlap.operations_strategy"


def _strategy(layer: Any) -> Any:
    from sglang_ext.srt.parallel.two_batch import prefill_strategy

    return prefill_strategy(layer)


def _note_decode(original: Callable[..., Any], layer: Any) -> Any:
    from sglang_ext.srt.parallel.seen import note

    note("two-batch split of a decode")
    return original(layer)


def _patch(function: str, replacement: Callable[..., Any], kind: Kind, why: str) -> Patch:
    return Patch(
        name=f"two-batch{function.removeprefix('_compute_moe').replace('_', '-')}",
        target=f"{_MODULE}:{function}",
        kind=kind,
        where=Where.CPU,
        stage=Stage.BACKEND,
        why=why,
        upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
        "batch_overlap/operations_strategy.py",
        signature="(layer)",
        until="the strategies ask the platform for SM counts",
        apply=lambda: hook(f"{_MODULE}.{function}", replacement, kind),
    )


_SMS = "the prefill schedule reads CUDA device properties to reserve SMs for communication"
_LOG = "the log says once that decode batches were split, which a run must be able to show"

QWEN_PATCH = _patch("_compute_moe_qwen3_prefill", _strategy, Kind.REPLACE, _SMS)
DEEPSEEK_PATCH = _patch("_compute_moe_deepseek_blog_prefill", _strategy, Kind.REPLACE, _SMS)
MIMO_PATCH = _patch("_compute_moe_mimov2_prefill", _strategy, Kind.REPLACE, _SMS)
QWEN_DECODE_PATCH = _patch("_compute_moe_qwen3_decode", _note_decode, Kind.AROUND, _LOG)
