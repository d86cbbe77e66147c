"""K/V of a rank on a CPU is sized by what its server has loaded, not by what others take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_BOOTSTRAP = "sglang.srt.distributed.bootstrap"
_SIZES = "sglang.srt.mem_cache.kv_cache_configurator"
_PROFILE = "KVCacheConfigurator._profile_available_bytes"
_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
_WHY = (
    "the memory of a CPU is not the server's alone: what other processes take while it loads "
    "counts as its weights, and the start fails"
)
_UNTIL = "K/V on a CPU is sized by what the ranks hold"


def _measure(original: Callable[..., float], *, device: str, is_draft_worker: bool) -> float:
    from sglang_ext.srt import kv_budget

    before = original(device=device, is_draft_worker=is_draft_worker)
    if not is_draft_worker:
        kv_budget.begin()
    return before


def _profile(original: Callable[[Any, Any], int], sizes: Any, pre_model_load_memory: Any) -> int:
    from sglang.srt.runtime_context import get_parallel, get_schedule

    from sglang_ext.srt.kv_budget import free_before

    fraction = get_schedule().mem_fraction_static
    return original(sizes, free_before(fraction, pre_model_load_memory, get_parallel()))


BEFORE_PATCH = Patch(
    name="kv-budget-before",
    target=f"{_BOOTSTRAP}:measure_pre_model_load_memory",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why=_WHY,
    upstream=f"{_UPSTREAM}distributed/bootstrap.py",
    signature="(*, device: str, is_draft_worker: bool) -> float",
    until=_UNTIL,
    apply=lambda: hook(f"{_BOOTSTRAP}.measure_pre_model_load_memory", _measure, Kind.AROUND),
)

PATCH = Patch(
    name="kv-budget",
    target=f"{_SIZES}:{_PROFILE}",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why=_WHY,
    upstream=f"{_UPSTREAM}mem_cache/kv_cache_configurator.py",
    signature="(self, pre_model_load_memory: 'int') -> 'int'",
    until=_UNTIL,
    apply=lambda: hook(f"{_SIZES}.{_PROFILE}", _profile, Kind.AROUND),
)
