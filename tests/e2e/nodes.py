"""Two nodes on one machine: a network namespace each, joined by a pair of virtual interfaces.

Addresses and routes exist only inside the namespaces. A process moves to a node with `move_to`,
where it has shared memory of its own too: ranks that find each other's take themselves for one
node. A thread of the test borrows a node's network with `inside`, for sockets it opens there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SGLANG_EXT_TEST_NODE"
FOLDER = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


@dataclass(frozen=True)
class Node:
    """One namespace: its name, the interface that leads to the other, and its address."""

    name: str
    interface: str
    address: str

    @property
    def env(self) -> dict[str, str]:
        """What a server's processes need to meet on this node's interface."""
        return {
            VARIABLE: self.name,
            "GLOO_SOCKET_IFNAME": self.interface,
            "SGLANG_HOST_IP": self.address,
        }


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Both nodes, removed at the end.

    Raises:
        PermissionError: the reason why this machine cannot make them.
    """
    if shutil.which("ip") is None:
        raise PermissionError("network namespaces need iproute2, which is not installed")
    tag = f"sgx{os.getpid()}"
    nodes = tuple(Node(f"{tag}n{i}", f"v{os.getpid()}n{i}", f"10.77.0.{i + 1}") for i in (0, 1))
    first, second = nodes
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        end = ("type", "veth", "peer", "name", second.interface, "netns", second.name)
        _in(first, "link", "add", first.interface, *end)
        for node in nodes:
            _in(node, "address", "add", f"{node.address}/30", "dev", node.interface)
            for interface in ("lo", node.interface):
                _in(node, "link", "set", interface, "up")
        yield first, second
    finally:
        for node in nodes:
            if (FOLDER / node.name).exists():
                _ip("netns", "delete", node.name)


def move_to(name: str) -> None:
    """The calling process, and what it starts from now on, is on a node until it ends."""
    _join(name)
    _check(_libc().unshare(_CLONE_NEWNS))
    _check(_libc().mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(_libc().mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))


@contextlib.contextmanager
def inside(node: Node) -> Iterator[None]:
    """The calling thread opens its sockets on `node` until the end of the block."""
    with Path("/proc/thread-self/ns/net").open() as home:
        _join(node.name)
        try:
            yield
        finally:
            _check(_libc().setns(home.fileno(), _CLONE_NEWNET))


def _join(name: str) -> None:
    with (FOLDER / name).open() as file:
        _check(_libc().setns(file.fileno(), _CLONE_NEWNET))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(failed: int) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _in(node: Node, *command: str) -> None:
    _ip("-netns", node.name, *command)


def _ip(*command: str) -> None:
    done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(command)}: {done.stderr.strip()}")
