"""Milliseconds of one forward of the built-in target, ways interleaved in one process, as JSON.

Compared: a bare torch loop, SGLang's own layers, and the fast forward, at decode and at verify
passes of several rows. The fast forward must agree with SGLang's own before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.bare_loop import BareLlama
from tests.adapters.fast_forward_switch import stock
from tests.adapters.model_world import ModelWorld, model_world

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


@dataclass(frozen=True)
class Way:
    """One way to run the same thing; `mode` is entered around each call, outside the clock."""

    call: Callable[[], object]
    mode: Callable[[], AbstractContextManager[None]] = nullcontext


def interleaved_ms(ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """Median of each way, all of them once per round so that a busy moment hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            with way.mode():
                start = time.perf_counter()
                way.call()
                spent = time.perf_counter() - start
            if turn:
                times[name].append(1e3 * spent)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def check(world: ModelWorld, dtype: str) -> None:
    """Raises SystemExit where the fast forward is not SGLang's own within rounding."""
    prompts = [[(start + 7919 * i) % 40_000 for i in range(40)] for start in (11, 12_345)]
    rows = [4, 2]
    fast = world.run(prompts, rows)
    with stock(world.model):
        expected = world.run(prompts, rows)
    for got, want in zip(fast, expected, strict=True):
        error = float((got - want).norm() / want.norm())
        if error > TOLERANCE[dtype]:
            raise SystemExit(
                f"fast forward: expected SGLang's logits within {TOLERANCE[dtype]} "
                f"of their norm, found a difference of {error:.4f}"
            )


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    bare = BareLlama(args.model, DTYPES[args.dtype], args.context, args.repeats + 1)
    with model_world(args.model, args.dtype) as world:
        torch.set_num_threads(args.threads)
        check(world, args.dtype)
        result = {}
        for rows in args.rows:
            call = world.prepared(args.context, rows)
            ways = {"fast": Way(call), "sglang": Way(call, partial(stock, world.model))}
            if rows == 1:
                ways["bare_loop"] = Way(partial(bare.step, torch.tensor([7])))
            result[f"rows_{rows}"] = interleaved_ms(ways, args.repeats)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    measured = measure(args)
    print(
        json.dumps(
            {
                "ms": measured,
                "threads": args.threads,
                "dtype": args.dtype,
                "load_average": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
