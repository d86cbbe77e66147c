"""The process that spreads requests over DP ranks sleeps until there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_WATCHDOG = "sglang.srt.utils.watchdog"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller"
_LOOP = "DataParallelController.event_loop"
_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
# How long a watchdog goes unfed at most; SGLang's own wait minutes.
_REST_MS = 500


def _create(original: Callable[..., Any], debug_name: str, *args: Any, **kwargs: Any) -> Any:
    if debug_name == "DataParallelController":
        from sglang_ext.patches import apply_all

        apply_all(portable_cpu=True, stage=Stage.CONTROLLER)
    return original(debug_name, *args, **kwargs)


def _event_loop(_original: Callable[[Any], None], controller: Any) -> None:
    """SGLang's loop, which asks its socket for a request without pause, with a wait for one."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    socket = controller.recv_from_tokenizer
    while True:
        controller.soft_watchdog.feed()
        if socket.poll(_REST_MS):
            controller._request_dispatcher(sock_recv(socket, flags=zmq.NOBLOCK))


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
    "core that the ranks of a CPU need",
    upstream=f"{_UPSTREAM}managers/data_parallel_controller.py",
    signature="(self)",
    until="the loop waits for its socket",
    apply=lambda: hook(f"{_CONTROLLER}.{_LOOP}", _event_loop, Kind.AROUND),
)
