"""The process that hands requests to DP ranks sleeps until there is one, and sees a rank die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_WATCHDOG = "sglang.srt.utils.watchdog"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller"
_LOOP = "DataParallelController.event_loop"
_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
# How long a watchdog goes unfed, and a dead rank unseen, at most.
_REST_MS = 500


def _create(original: Callable[..., Any], debug_name: str, *args: Any, **kwargs: Any) -> Any:
    if debug_name == "DataParallelController":
        from sglang_ext.patches import apply_all

        apply_all(portable_cpu=True, stage=Stage.CONTROLLER)
    return original(debug_name, *args, **kwargs)


def _event_loop(_original: Callable[[Any], None], controller: Any) -> None:
    """SGLang's loop with a wait for its socket, until a rank that this process started has died.

    Replicas (`--dp-size` alone) are children of this process: the launcher does not see them end.
    """
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    from sglang_ext.srt.parallel.rank_roll import ChildNames

    socket, names = controller.recv_from_tokenizer, ChildNames()
    while not names.look(controller.scheduler_procs):
        controller.soft_watchdog.feed()
        if socket.poll(_REST_MS):
            controller._request_dispatcher(sock_recv(socket, flags=zmq.NOBLOCK))
    # As ranks tell their parent of an error.
    os.kill(os.getppid(), signal.SIGQUIT)


STAGE_PATCH = Patch(
    name="controller-stage",
    target=f"{_WATCHDOG}:Watchdog.create",
    kind=Kind.AROUND,
    where=Where.CPU,
    why="this process builds no model and no worker; its own changes are made when it creates its "
    "watchdog, because its module is too costly to import everywhere",
    upstream=f"{_UPSTREAM}utils/watchdog.py",
    signature="(debug_name: 'str', watchdog_timeout: 'Optional[float]', soft: 'bool' = False, "
    "test_stuck_time: 'float' = 0) -> 'Watchdog'",
    until="`resting-controller` can be deleted",
    apply=lambda: hook(f"{_WATCHDOG}.Watchdog.create", _create, Kind.AROUND),
)

PATCH = Patch(
    name="resting-controller",
    target=f"{_CONTROLLER}:{_LOOP}",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.CONTROLLER,
    why="with DP ranks, the process that hands out requests asks for the next one without pause: a "
    "core that the ranks of a CPU need; and requests to a replica that was killed wait for ever",
    upstream=f"{_UPSTREAM}managers/data_parallel_controller.py",
    signature="(self)",
    until="the loop waits for its socket and ends with its children",
    apply=lambda: hook(f"{_CONTROLLER}.{_LOOP}", _event_loop, Kind.AROUND),
)
