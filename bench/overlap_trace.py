"""What two-batch and single-batch overlap can earn in a model, and a trace to look at.

Writes trace events that Perfetto (ui.perfetto.dev) and chrome://tracing read. Durations are given
by hand or fitted elsewhere: the result is a model of one compute and one communication stream, not
a measurement. Every schedule must be free of hazards before it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.core.overlap import (
    DECODE,
    PREFILL,
    SEQUENTIAL,
    SINGLE,
    Issued,
    Timed,
    hidden_share,
    makespan,
    one_batch,
    simulate,
    trace_faults,
    two_batch,
)

# Microseconds of one layer for the whole batch.
_COSTS = {
    "prepare": 20.0,
    "attention": 180.0,
    "gate": 20.0,
    "dispatch_a": 120.0,
    "shared_experts": 60.0,
    "experts": 200.0,
    "combine_a": 180.0,
    "output": 10.0,
}


def events(name: str, process: int, times: Sequence[Timed]) -> list[dict[str, Any]]:
    """Complete events in microseconds; a process per schedule, a thread per stream and half."""
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    ]
    for t in times:
        item, network = t.issued, t.issued.op.stream == "send"
        rows.append(
            {
                "name": f"{item.op.name} L{item.layer}",
                "cat": "communication" if network else item.op.stream,
                "ph": "X",
                "ts": 1e6 * t.start,
                "dur": 1e6 * (t.end - t.start),
                "pid": process,
                "tid": 2 * item.half + network,
                "args": {"half": item.half, "reads": item.op.reads, "writes": item.op.writes},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    shrinks_not = "share of an operation's time that a half batch does not halve"
    parser.add_argument("--fixed", type=float, default=0.2, help=shrinks_not)
    parser.add_argument("--out", type=Path, default=Path("overlap_trace.json"))
    for name, cost in _COSTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=cost, help="us")
    options = parser.parse_args()
    share = options.fixed + (1 - options.fixed) / 2

    def whole(item: Issued) -> float:
        return 1e-6 * float(getattr(options, item.op.name))

    def half(item: Issued) -> float:
        return share * whole(item)

    runs = {
        "sequential": (one_batch(SEQUENTIAL, options.layers), whole),
        "single batch": (one_batch(SINGLE, options.layers), whole),
        "two batch, prefill": (two_batch(PREFILL, options.layers, 0), half),
        "two batch, decode": (two_batch(DECODE, options.layers, 2), half),
    }
    rows: list[dict[str, Any]] = []
    base = makespan(simulate(*runs["sequential"]))
    for process, (name, run) in enumerate(runs.items()):
        times = simulate(*run)
        if faults := trace_faults(times):
            raise SystemExit(f"{name}: {faults[0]}")
        rows += events(name, process, times)
        print(f"{name}: {base / makespan(times):.3f} x, hidden {hidden_share(times):.0%} (model)")
    options.out.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n")


if __name__ == "__main__":
    main()
