"""A server as a child process: leader of a group of its own, and ended with all of the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

SERVER = (sys.executable, "-m", "sglang.launch_server")


def start(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` without waiting, its output in `log`; `env` adds to this process's own."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            list(command),
            env=_without_proxy({**os.environ, **(env or {})}, command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _without_proxy(env: dict[str, str], command: Sequence[str]) -> dict[str, str]:
    """SGLang warms itself up by requests to its own address, which no proxy may take."""
    hosts = [value for flag, value in pairwise(command) if flag == "--host"]
    said = env.get("no_proxy") or env.get("NO_PROXY")
    direct = ",".join([*([said] if said else []), "localhost", "127.0.0.1", "::1", *hosts])
    return {**env, "no_proxy": direct, "NO_PROXY": direct}


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
