"""Who the ranks of a server are, so that one that dies is told by name and not by an address.

A rank's name is that of its process: `DP1 TP1 EP1` is `sglang::scheduler_DP1_TP1_EP1` in `ps` and
the prefix of its lines in the log.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

logger = logging.getLogger(__name__)

_TITLE = "sglang::scheduler"
_LOST = re.compile(r"by peer|broken pipe|connection (refused|aborted)|timed? ?out|nccl", re.I)
# A process that is killed closes its sockets a moment before it counts as dead.
_SECONDS = 3.0


@dataclass(frozen=True)
class Rank:
    """name: such as "DP1 TP1 EP1"; pid: on its node; node: its number; address: of that node."""

    name: str
    pid: int
    node: int
    address: str

    def is_dead(self) -> bool:
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


def rank_name(title: str) -> str | None:
    """The name of the rank whose process has this title; None for another process."""
    if not title.startswith(_TITLE):
        return None
    return title.removeprefix(_TITLE).replace("_", " ").strip() or "TP0"


def roll_call() -> list[Rank]:
    """All ranks of this world, this one included. Every rank calls it at the same point."""
    from setproctitle import getproctitle
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.network import get_local_ip_auto

    group = get_world_group()
    if group.world_size == 1:
        return []
    mine = Rank(
        rank_name(getproctitle()) or f"rank {group.rank}",
        psutil.Process().pid,
        get_parallel().node_rank,
        get_local_ip_auto("unknown"),
    )
    roll: list[Any] = [None] * group.world_size
    dist.all_gather_object(roll, mine, group=group.cpu_group)
    return roll


def report_lost_peer(roll: list[Rank], error: BaseException) -> None:
    """Log which rank is gone when `error` says that a peer is."""
    if not roll or not _LOST.search(str(error)):
        return
    from sglang.srt.runtime_context import get_parallel

    # Not by the pid: nodes with process namespaces of their own may share numbers.
    node = get_parallel().node_rank
    here = [rank for rank in roll if rank.node == node]
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        dead = [rank for rank in here if rank.is_dead()]
        if dead:
            logger.error("%s: the server ends", _are_dead(dead))
            return
        time.sleep(0.05)
    elsewhere = [rank for rank in roll if rank.node != node]
    # Messages of gloo and NCCL carry the address of the peer.
    named = [rank for rank in elsewhere if rank.address in str(error)] or elsewhere
    if named:
        logger.error(
            "all ranks of node %d live; lost was one of %s: the server ends. See that node's log.",
            node,
            ", ".join(f"{rank.name} (node {rank.node}, {rank.address})" for rank in named),
        )


def _are_dead(ranks: list[Rank]) -> str:
    return ", ".join(f"rank {rank.name} (pid {rank.pid}) has died" for rank in ranks)


class ChildNames:
    """Titles of child processes, read while they live."""

    def __init__(self) -> None:
        self._titles: dict[int, str] = {}

    def look(self, processes: list[Any]) -> bool:
        """Learn the titles of the living; log those that ended with an error: were there any?

        processes: multiprocessing.Process
        """
        died = False
        for process in processes:
            if process.is_alive():
                self._learn(process.pid)
            elif process.exitcode:
                died = True
                title = self._titles.get(process.pid, "a process")
                name = rank_name(title)
                logger.error(
                    "%s (pid %d) has died, %s: the server ends",
                    title if name is None else f"rank {name}",
                    process.pid,
                    _ending(process.exitcode),
                )
        return died

    def _learn(self, pid: int) -> None:
        if self._titles.get(pid, "").startswith("sglang::"):
            return
        try:
            self._titles[pid] = psutil.Process(pid).name()
        except psutil.Error:
            return


def _ending(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
