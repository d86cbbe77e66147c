"""Two servers from one command line: as given, and without its speculative flags."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from sglang_ext import child
from sglang_ext.lossless.endpoint import Endpoint, connect
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.flow import Side

_SPECULATIVE = "--speculative-"
# SGLang derives further ports from the one it is given.
_APART = 10


def without_speculation(argv: Sequence[str]) -> list[str]:
    """The command line with every `--speculative-*` flag and its values taken out."""
    kept: list[str] = []
    dropping = False
    for part in argv:
        if part.startswith("--"):
            dropping = part.startswith(_SPECULATIVE)
        if not dropping:
            kept.append(part)
    return kept


def check_arguments(argv: Sequence[str]) -> None:
    """Refuse a command line that cannot be run with and without speculation."""
    if not any(part.startswith(f"{_SPECULATIVE}algorithm") for part in argv):
        raise CannotTest(
            "launch arguments",
            expected="--speculative-algorithm NAME among them",
            found=" ".join(argv) or "nothing",
            remedy="Give the arguments of the server whose speculation is to be checked.",
        )
    for flag in ("--port", "--host"):
        if any(part == flag or part.startswith(f"{flag}=") for part in argv):
            raise CannotTest(
                "launch arguments",
                expected=f"no {flag}",
                found=flag,
                remedy="Leave it out: the servers are started on free local ports (--first-port).",
            )


class LaunchedServer:
    """`python -m sglang.launch_server` in a process group of its own."""

    def __init__(
        self,
        argv: Sequence[str],
        port: int,
        seconds: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.seconds = port, seconds
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(tempfile.mkstemp(prefix="sglang-ext-server-", suffix=".log")[1])
        self.command = [*child.SERVER, *argv, "--host", "127.0.0.1", "--port", str(port)]
        self.process = child.start(self.command, self.log, env)

    def wait_ready(self) -> None:
        """Raises CannotTest with the end of the log when the server does not come up."""
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=10, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        code = self.process.poll()
        found = f"{self.seconds:g} s of waiting" if code is None else f"exit code {code}"
        tail = child.last_lines(self.log)
        raise CannotTest(
            "server",
            expected="to be ready",
            found=found,
            remedy=f"Its command: {' '.join(self.command)}\nIts log ends with:\n{tail}",
        )

    def stop(self) -> None:
        child.end(self.process)
        self.log.unlink(missing_ok=True)


class Pair:
    """Opens the side that is asked for, starting its server when it is not up.

    together: keep both up; otherwise one is stopped before the other is started
    key, api: as for `connect`
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        together: bool,
        first_port: int,
        seconds: float = 900,
        report: Callable[[str], None] = lambda line: None,
        key: str | None = None,
        api: str = "auto",
    ) -> None:
        check_arguments(argv)
        self.key, self.api = key, api
        self.argv = {Side.SPEC: list(argv), Side.BASE: without_speculation(argv)}
        self.together, self.seconds, self.report = together, seconds, report
        self._next_port = first_port
        self._up: dict[Side, tuple[LaunchedServer, Endpoint]] = {}

    @contextmanager
    def __call__(self, side: Side) -> Iterator[Endpoint]:
        if side not in self._up:
            if not self.together:
                self.close()
            self._start(side)
        yield self._up[side][1]

    def _start(self, side: Side) -> None:
        port = free_port(self._next_port)
        self._next_port = port + _APART
        self.report(f"starting the {side} server on port {port}")
        server = LaunchedServer(self.argv[side], port, self.seconds)
        try:
            server.wait_ready()
            self._up[side] = server, connect(server.url, key=self.key, api=self.api)
        except BaseException:
            server.stop()
            raise

    def close(self) -> None:
        while self._up:
            self._up.popitem()[1][0].stop()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port(first: int, tries: int = 100) -> int:
    """The first port from `first` up that nobody listens on."""
    for port in range(first, min(first + tries * _APART, 65536), _APART):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise CannotTest(
        "--first-port",
        expected=f"a free port from {first} on",
        found="none",
        remedy="Name another range.",
    )
