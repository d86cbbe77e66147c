"""The one way Triton kernels are started, so that what is started can also be recorded.

With a recorder open nothing runs: an op called on tensors of the "meta" device then tells which
kernels it would start, with which argument types and constants. Ahead-of-time compilation and the
resource table (`aot.py`) read these records, so they see what a real call launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One kernel start.

    Attributes:
        kernel: the jitted function.
        grid: programs along up to three axes.
        args: run-time arguments in the order of the kernel's parameters: tensors, ints, floats.
        constants: compile-time parameters by name.
        num_warps: warps of one program.
        num_stages: depth of software pipelining.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


_recorders: list[list[Launch]] = []


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    records: list[Launch] = []
    _recorders.append(records)
    try:
        yield records
    finally:
        _recorders.remove(records)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    **constants: Any,
) -> None:
    """Start `kernel` on the device of its first argument; an empty grid starts nothing."""
    if _recorders:
        record = Launch(kernel, grid, args, constants, num_warps, num_stages)
        _recorders[-1].append(record)
        return
    if 0 in grid:
        return
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, n >= 1."""
    return 1 << (n - 1).bit_length()
