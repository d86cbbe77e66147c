"""A rank that dies is named, by its peers and by the launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_SCHEDULER = "sglang.srt.managers.scheduler"
_WATCHDOG = "sglang.srt.utils.watchdog"
_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"


def _run(original: Callable[[Any], None], scheduler: Any) -> None:
    from sglang_ext.srt.parallel.rank_roll import report_lost_peer, roll_call

    roll = roll_call()
    try:
        original(scheduler)
    except Exception as error:
        report_lost_peer(roll, error)
        raise


def _check(original: Callable[[Any], bool], watchdog: Any) -> bool:
    from sglang_ext.srt.parallel.rank_roll import ChildNames

    names = watchdog.__dict__.setdefault("_child_names", ChildNames())
    names.look(watchdog._processes)
    return original(watchdog)


PEERS_PATCH = Patch(
    name="dead-peer",
    target=f"{_SCHEDULER}:Scheduler.run_event_loop",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="while requests run, a rank that dies is first noticed by a peer, whose error carries the "
    "address of a socket and no rank",
    upstream=f"{_UPSTREAM}managers/scheduler.py",
    signature="(self) -> None",
    until="the error of a failed exchange names the rank",
    apply=lambda: hook(f"{_SCHEDULER}.Scheduler.run_event_loop", _run, Kind.AROUND),
)

CHILDREN_PATCH = Patch(
    name="dead-child",
    target=f"{_WATCHDOG}:SubprocessWatchdog._check_processes",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="the launcher numbers its children in the order they were started",
    upstream=f"{_UPSTREAM}utils/watchdog.py",
    signature="(self) -> 'bool'",
    until="the watchdog is given the names of the ranks",
    apply=lambda: hook(f"{_WATCHDOG}.SubprocessWatchdog._check_processes", _check, Kind.AROUND),
)
