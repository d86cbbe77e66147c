"""Test servers: started from the warm parent, kept while they are in use, never left behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.client import Client

ROOT = Path(__file__).resolve().parents[2]
# From the default on they end below the ports that Linux hands out by itself (32768).
PORTS = 360
# Test processes that run side by side (pytest-xdist: gw0, gw1) have a range each.
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST_PORT = int(os.environ.get("SGLANG_EXT_TEST_PORT", "32000")) + _PROCESS * PORTS
READY_SECONDS = float(os.environ.get("SGLANG_EXT_TEST_START_SECONDS", "180"))
PORT_TAKEN = "address already in use"
FATAL = ("Scheduler hit an exception", "leak detected", "double free", "use-after-free")

# Small pools and one thread: tests measure nothing, and many servers share the machine.
BASE_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def failed(log: str) -> bool:
    """Whether a scheduler died, or its own check found slots missing."""
    return any(mark in log for mark in FATAL)


class StartFailure(RuntimeError):
    """A server ended, or hung, before it was ready; carries its exit code and log."""

    def __init__(self, code: int | None, log: str) -> None:
        super().__init__(f"server did not start (exit code {code}):\n{log[-6000:]}")
        self.code, self.log = code, log


@dataclass(frozen=True)
class Spec:
    """What distinguishes one server from another: its arguments and its environment."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, *argv: object, env: Mapping[str, str] | None = None) -> Spec:
        return cls(tuple(str(a) for a in argv), tuple(sorted((env or {}).items())))


class WarmParent:
    """The zygote process and the state of its children."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.zygote"],
            cwd=ROOT,
            env={**os.environ, **BASE_ENV},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        self._changed = threading.Condition()
        self._ready = False
        threading.Thread(target=self._listen, daemon=True).start()
        self._wait(lambda: self._ready, READY_SECONDS)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._changed:
                if "ready" in answer:
                    self._ready = True
                elif "started" in answer:
                    self._started.append(answer["started"])
                else:
                    self.codes[answer["ended"]] = answer["code"]
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                raise TimeoutError("the warm parent does not answer")

    def start(self, spec: Spec, log: Path) -> int:
        """Fork a child for `spec`; returns its pid, which is also its process group."""
        order = {"argv": list(spec.argv), "env": dict(spec.env), "log": str(log)}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self._wait(lambda: bool(self._started), 30)
        with self._changed:
            return self._started.pop()

    def wait(self, pid: int, seconds: float) -> int | None:
        """Exit code of a child, or None when it is still running after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self.codes, seconds)
            return self.codes.get(pid)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass
class Server:
    """A running server: `client` speaks to it, `log()` is all it printed."""

    spec: Spec
    pid: int
    port: int
    log_file: Path
    parent: WarmParent
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(f"http://127.0.0.1:{self.port}")

    def log(self) -> str:
        # A forked server makes its log itself, a moment after it is known here.
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def assert_healthy(self) -> None:
        """Raise when a rank died or a traceback of the scheduler was printed."""
        assert self.pid not in self.parent.codes, f"server ended:\n{self.log()[-6000:]}"
        assert not failed(self.log()), self.log()[-6000:]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            code = self.parent.wait(self.pid, 0.1)
            if code is not None or failed(self.log()):
                raise StartFailure(code, self.log())
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/health", timeout=5).status_code == 200:
                    return
        raise StartFailure(None, self.log())

    def stop(self) -> None:
        """SIGTERM first: a server that is killed outright leaves semaphores in /dev/shm."""
        self.client.close()
        if self.pid not in self.parent.codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.parent.wait(self.pid, 15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ServerPool:
    """Servers by `Spec`; the least recently used one makes room for the next."""

    def __init__(self, alive: int = 3) -> None:
        self.alive = alive
        self._parent: WarmParent | None = None
        self._servers: OrderedDict[Spec, Server] = OrderedDict()
        self._retiring: list[threading.Thread] = []
        self._folder = Path(tempfile.mkdtemp(prefix="sglang-ext-e2e-"))
        # Runs that share the range start at different places in it.
        self._count = os.getpid()
        atexit.register(self.close)

    @property
    def parent(self) -> WarmParent:
        if self._parent is None:
            self._parent = WarmParent()
        return self._parent

    def next_port(self) -> int:
        """A port nobody listens on; another test run may share the range."""
        for _ in range(PORTS):
            # SGLang derives further ports from this one, more of them with more DP ranks; 20 apart
            # keeps neighbours out of reach.
            port = FIRST_PORT + self._count * 20 % PORTS
            self._count += 1
            if _is_free(port):
                return port
        raise RuntimeError(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS}")

    def _order(self, spec: Spec) -> tuple[Spec, int, Path]:
        port = self.next_port()
        network = ("--host", "127.0.0.1", "--port", str(port))
        log = self._folder / f"server-{port}-{self._count}.log"
        return Spec(spec.argv + network, spec.env), port, log

    def get(self, spec: Spec) -> Server:
        """The server of `spec`, started when it is not running; StartFailure when it cannot."""
        if spec in self._servers:
            self._servers.move_to_end(spec)
            server = self._servers[spec]
            server.assert_healthy()
            return server
        # DP ranks ask each other for work without rest: such a server slows every other start.
        for other in [s for s in self._servers if {"--attn-dp-size", "--dp-size"} & set(s.argv)]:
            self._retire(self._servers.pop(other))
        while len(self._servers) >= self.alive:
            self._retire(self._servers.popitem(last=False)[1])
        for attempt in range(3):
            order, port, log = self._order(spec)
            server = Server(spec, self.parent.start(order, log), port, log, self.parent)
            try:
                server.wait_ready()
            except BaseException as error:
                server.stop()
                # SGLang draws some ports at random, and a neighbour's may be this one.
                if attempt < 2 and isinstance(error, StartFailure) and PORT_TAKEN in error.log:
                    continue
                raise
            break
        self._servers[spec] = server
        return server

    def _retire(self, server: Server) -> None:
        """Stop a server while the next one starts: a graceful end takes seconds of waiting."""
        self._retiring = [thread for thread in self._retiring if thread.is_alive()]
        self._retiring.append(threading.Thread(target=server.stop))
        self._retiring[-1].start()

    def drop(self, spec: Spec) -> None:
        """Stop the server of `spec` if it runs."""
        if spec in self._servers:
            self._servers.pop(spec).stop()

    def launch_and_wait(self, spec: Spec, seconds: float = 60) -> tuple[int | None, str, int]:
        """Run a launch that should end by itself: (exit code, log, pid)."""
        order, _, log = self._order(spec)
        pid = self.parent.start(order, log)
        code = self.parent.wait(pid, seconds)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self.parent.wait(pid, 10)
        return code, log.read_text(errors="replace"), pid

    def close(self) -> None:
        while self._servers:
            self._retire(self._servers.popitem()[1])
        for thread in self._retiring:
            thread.join()
        if self._parent is not None:
            self._parent.close()
            self._parent = None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def group_is_gone(leader: int, seconds: float = 5) -> bool:
    """Whether no process of a group is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def speculation(algorithm: str, draft: Path, gamma: int | None = None) -> Sequence[object]:
    """The flags that turn `algorithm` on."""
    flags: list[object] = [
        "--speculative-algorithm",
        algorithm,
        "--speculative-draft-model-path",
        draft,
    ]
    if gamma is not None:
        flags += ["--speculative-num-draft-tokens", gamma + 1]
    return flags
