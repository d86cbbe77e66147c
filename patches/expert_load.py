"""A rebalance of experts says what it has gained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.eplb.eplb_manager"
_METHOD = "EPLBManager._compute_expert_location_metadata"


def _place(original: Callable[..., Any], manager: Any, logical_count: Any, **options: Any) -> Any:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    from sglang_ext.srt.parallel.expert_load import report

    placed = original(manager, logical_count, **options)
    report(logical_count, get_global_expert_location_metadata(), placed)
    return placed


PATCH = Patch(
    name="expert-load",
    target=f"{_MODULE}:{_METHOD}",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.BACKEND,
    why="SGLang reports how balanced a forward pass was, not what a rebalance changed",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/eplb/"
    "eplb_manager.py",
    signature="(self, logical_count, *, broadcast_over_world: 'bool') -> 'ExpertLocationMetadata'",
    until="the manager reports the balance of the placement it leaves and of the one it makes",
    apply=lambda: hook(f"{_MODULE}.{_METHOD}", _place, Kind.AROUND),
)
