"""New weights that are meant for the draft alone are refused, not dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
_WHY = (
    "selector: expected 'target' or 'all', found 'draft': a DSPARK or DFLASH draft keeps the "
    "weights it was started with. Restart the server with the new draft."
)


class _Refusing:
    """Stands where a runner and its weight updater are asked for, and says no."""

    @property
    def weight_updater(self) -> _Refusing:
        return self

    def begin_weight_update(self) -> None:
        return None

    def end_weight_update(self, *, run_post_load: bool) -> None:
        return None

    def _refuse(self, *_: Any, **__: Any) -> tuple[bool, str]:
        return False, _WHY

    update_weights_from_tensor = load_weights_from_distributed = _refuse


def _or_refuse(
    original: Callable[..., list[tuple[str, Any]]], manager: Any, selector: str = "all"
) -> list[tuple[str, Any]]:
    from sglang_ext.srt.spec.worker_base import BlockSpecWorker

    if selector == "draft" and isinstance(manager.draft_worker, BlockSpecWorker):
        return [("draft", _Refusing())]
    return original(manager, selector)


PATCH = Patch(
    name="draft-updates",
    target=f"{_MODULE}:SchedulerWeightUpdaterManager._select_runners",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.WORKER,
    why="an update for the draft alone would find no runner and report success",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/managers/"
    "scheduler_components/weight_updater.py",
    signature="(self, selector: 'str' = 'all') -> 'List[Tuple[str, Any]]'",
    until="our worker loads draft weights by name",
    apply=lambda: hook(
        f"{_MODULE}.SchedulerWeightUpdaterManager._select_runners", _or_refuse, Kind.AROUND
    ),
)
