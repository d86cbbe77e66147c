"""A server as a child process: leader of a group of its own, and ended with all of the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SERVER = (sys.executable, "-m", "sglang.launch_server")


def start(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` without waiting, its output in `log`; `env` adds to this process's own."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            list(command),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], patience: float = 20.0) -> None:
    """End the whole group: SIGTERM, then SIGKILL for what is left after `patience` seconds.

    SIGTERM first, because a server that is killed outright leaves semaphores in /dev/shm.
    """
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process.poll()
            if not group_lives(process.pid):
                return
            time.sleep(0.05)


def group_lives(leader: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, "" where there is none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-count:])
