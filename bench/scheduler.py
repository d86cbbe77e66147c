"""Time of the prefix scheduler, as JSON. The brute force must agree before anything is timed."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from sglang_ext.core.spec.schedule import LaggedScheduler, schedule_prefixes
from sglang_ext.core.spec.sps import SpsTable

LIMIT_MS = 0.3


def brute_force(survivals: np.ndarray, table: SpsTable) -> list[int]:
    requests, gamma = survivals.shape
    seconds = table.seconds(requests, requests * (gamma + 1))
    pool = sorted((-survivals[r, j], j, r) for r in range(requests) for j in range(gamma))
    lengths, tau, best = [0] * requests, float(requests), requests / seconds[0]
    for rank, (minus, j, r) in enumerate(pool, start=1):
        tau -= minus
        if minus == 0 or tau / seconds[rank] <= best:
            break
        best, lengths[r] = tau / seconds[rank], j + 1
    return lengths


def median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    rows = []
    for requests, gamma in ((1, 7), (8, 7), (32, 7), (256, 7)):
        survivals = np.cumprod(rng.uniform(0.3, 1.0, (requests, gamma)), axis=1)
        top = requests * (gamma + 1)
        table = SpsTable.from_seconds({1: 0.02, max(top // 2, 2): 0.03, top + 1: 0.08})
        lengths = schedule_prefixes(survivals, table)
        if lengths != brute_force(survivals, table):
            raise SystemExit(f"scheduler disagrees with brute force at {requests} x {gamma}")
        lagged, keys = LaggedScheduler(table), list(range(requests))
        rows.append(
            {
                "requests": requests,
                "gamma": gamma,
                "admitted": sum(lengths),
                "algorithm_1_ms": median_ms(partial(schedule_prefixes, survivals, table), repeats),
                "lagged_ms": median_ms(partial(lagged.plan, keys, survivals), repeats),
            }
        )
    worst = max(row["algorithm_1_ms"] for row in rows)
    print(json.dumps({"rows": rows, "limit_ms": LIMIT_MS, "within_limit": worst <= LIMIT_MS}))


if __name__ == "__main__":
    main()
