"""The speed table of a machine, from the grid that a worker of ours measures at its start."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from sglang_ext.core.spec.errors import TableError
from sglang_ext.core.spec.speed_grid import SpeedGrid
from sglang_ext.core.spec.sps import AdditiveTable, SpsTable
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.servers import LaunchedServer, check_arguments, free_port

# SGLang's reader wants a bias above 0.
_LEAST_SECONDS = 1e-9


def measure(
    argv: Sequence[str], *, first_port: int, seconds: float, report: Callable[[str], None]
) -> SpeedGrid:
    """Start the server once with an empty cache, and take the grid it has measured.

    Raises CannotTest where the server does not start or measures nothing.
    """
    check_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="sglang-ext-sps-") as cache:
        port = free_port(first_port)
        report(f"starting the server on port {port}; it measures itself before it is ready")
        server = LaunchedServer(argv, port, seconds, {"SGLANG_EXT_CACHE": cache})
        try:
            server.wait_ready()
        finally:
            server.stop()
        found = sorted(Path(cache, "speed").glob("*.json"))
        if not found:
            raise CannotTest(
                "speed grid",
                expected="one, measured by a worker of sglang-ext",
                found="none: the server runs SGLang's own worker, or the target alone",
                remedy="Set SGLANG_EXT_SPEC=always, or use SGLang's profiler: "
                "python -m sglang.benchmark.dspark_sps_profiler.",
            )
        return SpeedGrid.load(found[0])


def read_grid(path: Path) -> SpeedGrid:
    """A grid file of the cache. Raises CannotTest."""
    try:
        return SpeedGrid.load(path)
    except TableError as error:
        raise CannotTest(
            "--grid", expected="a speed grid", found=error, remedy="Measure again without --grid."
        ) from error


def sps_table(grid: SpeedGrid) -> SpsTable:
    """Steps per second by verify rows; several shapes with the same rows count by their mean."""
    times: dict[int, list[float]] = {}
    for requests, row in zip(grid.requests, grid.verify_seconds, strict=True):
        for rows, seconds in zip(grid.rows, row, strict=True):
            times.setdefault(requests * rows, []).append(seconds)
    return SpsTable.from_seconds({rows: float(np.mean(t)) for rows, t in times.items()})


def additive_table(grid: SpeedGrid) -> tuple[AdditiveTable, float]:
    """bias + alpha(requests) + theta(rows), and its greatest relative error on the grid.

    Least squares over non-negative increments, so that both curves rise (Lawson and Hanson 1974).
    """
    sizes = sorted({b * n for b in grid.requests for n in grid.rows})
    seconds = np.asarray(grid.verify_seconds)
    design, times = [], []
    for i, requests in enumerate(grid.requests):
        for j, rows in enumerate(grid.rows):
            steps = [requests >= b for b in grid.requests[1:]]
            steps += [requests * rows >= size for size in sizes[1:]]
            # Weighed by 1 / time: a relative error counts alike at every size.
            design.append(np.array([1.0, *steps]) / seconds[i, j])
            times.append(1.0)
    solved, _ = nnls(np.array(design), np.array(times))
    split = len(grid.requests)
    alpha = np.concatenate([[0.0], np.cumsum(solved[1:split])])
    theta = np.concatenate([[0.0], np.cumsum(solved[split:])])
    table = AdditiveTable(
        max(float(solved[0]), _LEAST_SECONDS),
        grid.requests,
        tuple(alpha.tolist()),
        tuple(sizes),
        tuple(theta.tolist()),
    )
    off = [
        abs(float(table.seconds(b, b * n)[-1]) / seconds[i, j] - 1.0)
        for i, b in enumerate(grid.requests)
        for j, n in enumerate(grid.rows)
    ]
    return table, max(off)
