"""A warm parent for test servers: imports SGLang once, then forks one server per order.

Run as `python -m tests.e2e.zygote`. Orders arrive as JSON lines on stdin; for each, a child in a
process group of its own runs what `python -m sglang.launch_server` runs, with the argument vector,
environment and log file of the order. Answers are JSON lines on the original stdout: the child's
pid when it starts, its exit code when it ends. End of input kills every group that is left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
from typing import Any

from tests.e2e.faults import VARIABLE as FAULT
from tests.e2e.faults import plant
from tests.e2e.nodes import VARIABLE as NODE
from tests.e2e.nodes import move_to


def _warm() -> None:
    """Import what every process of a server imports, with the plugin in force."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    _fork_replicas_in_turn()
    # Ranks fork from here as well, so SGLang must not switch back to spawn.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()


def _fork_replicas_in_turn() -> None:
    """SGLang starts replicas from a thread each. While the second logs that it starts, it holds the
    lock of the buffer behind stdout; a first replica forked in that moment waits for it for ever at
    its own first line. Spawned children, as users have, hold no lock."""
    from sglang.srt.managers.data_parallel_controller import DataParallelController as Controller

    launch, turn = Controller.launch_tensor_parallel_group, threading.Lock()

    def in_turn(*args: Any, **options: Any) -> None:
        with turn:
            launch(*args, **options)

    Controller.launch_tensor_parallel_group = in_turn


def _reread_import_time_flags() -> None:
    """Flags that SGLang reads while it is imported, which happened before the order came."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def _serve(argv: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _child(order: dict[str, Any]) -> None:
    """Become the server; never returns."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["env"])
    if NODE in order["env"]:
        move_to(order["env"][NODE])
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    code = 1
    try:
        _reread_import_time_flags()
        plant(order["env"].get(FAULT))
        _serve(order["argv"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Zygote:
    """Reads orders, forks, reaps."""

    def __init__(self) -> None:
        # SGLang prints; answers keep a descriptor that nothing else writes to.
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.groups: set[int] = set()

    def answer(self, **fields: Any) -> None:
        self.answers.write(json.dumps(fields) + "\n")

    def start(self, order: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            _child(order)
        self.groups.add(pid)
        self.answer(started=pid)

    def reap(self) -> None:
        for pid in list(self.groups):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.groups.discard(pid)
                _kill_group(pid)
                self.answer(ended=pid, code=os.waitstatus_to_exitcode(status))

    def run(self) -> None:
        self.answer(ready=True)
        buffered = b""
        while True:
            self.reap()
            if not select.select([0], [], [], 0.05)[0]:
                continue
            chunk = os.read(0, 1 << 16)
            if not chunk:
                break
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                self.start(json.loads(line))
        for pid in self.groups:
            _kill_group(pid)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    zygote = Zygote()
    _warm()
    zygote.run()
