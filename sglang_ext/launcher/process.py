"""One server as a child: started, waited for, and ended with everything it started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from sglang_ext import child
from sglang_ext.launcher.compose import Launch
from sglang_ext.launcher.diagnose import Cause, explain
from sglang_ext.launcher.stages import stage_of

_UNKNOWN = "No known cause; the last lines:\n"


class StartError(RuntimeError):
    """A server ended, or was not ready in time.

    code: its exit code, or None; cause: what its log says; log: where that is
    """

    def __init__(self, code: int | None, log: Path, cause: Cause | None) -> None:
        self.code, self.log, self.cause = code, log, cause
        what = "was not ready in time" if code is None else f"ended with code {code}"
        why = (
            f"{cause.name}: {cause.evidence}\n{cause.remedy}"
            if cause
            else _UNKNOWN + child.last_lines(log)
        )
        super().__init__(f"the server {what}. {why}\nLog: {log}")


@dataclass
class Server:
    """A running child, leader of a process group of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, launch: Launch, log: Path) -> Server:
        """Starts without waiting; output goes to `log`."""
        process = child.start([*child.SERVER, *launch.argv()], log, launch.env)
        return cls(process, log)

    def wait_until_ready(
        self, url: str | None, seconds: float, show: Callable[[str], None]
    ) -> None:
        """Returns when `url` is healthy; a node without a port (url None) only has to live.

        Raises:
            StartError: the child ended, or `seconds` passed.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise StartError(code, self.log, explain(self.text()))
            show(stage_of(self.text()))
            if url is None:
                return
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise StartError(None, self.log, explain(self.text()))

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[Server]:
    """A started server; leaving, by Ctrl-C, SIGTERM or a closed terminal too, ends its group."""

    def leave(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    early: list[int] = []
    signs = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Held back until the child is known, as an interrupt before that could not end it. A handler,
    # not SIG_IGN: what is ignored stays ignored in the child.
    before = {sign: signal.signal(sign, lambda number, _: early.append(number)) for sign in signs}
    server = None
    try:
        server = Server.start(launch, log)
        for sign in signs:
            signal.signal(sign, leave)
        for number in early:
            leave(number, None)
        yield server
    finally:
        # A second Ctrl-C must not cut the clean-up short.
        for sign in signs:
            signal.signal(sign, signal.SIG_IGN)
        if server is not None:
            child.end(server.process)
        for sign, handler in before.items():
            signal.signal(sign, handler)
