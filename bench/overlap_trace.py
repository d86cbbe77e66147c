"""What two-batch and single-batch overlap can earn in a model, and a trace to look at.

Writes trace events that Perfetto (ui.perfetto.dev) and chrome://tracing read. Durations are given
by hand or fitted elsewhere: the result is a model of one compute and one communication stream, not
a measurement. Every schedule must be free of hazards before it is timed.

With --recorded it writes what ranks over gloo did instead: experts of random weights under
single-batch overlap, in the order that a served model follows. That shows the order, not a speed:
the ranks share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
from sglang_ext.core.overlap_run import Recorder
from sglang_ext.kernels.moe import Activation, ExpertWeights
from sglang_ext.srt.parallel.expert_exchange import ExpertExchange
from sglang_ext.srt.parallel.single_batch import OverlappedLayer, run_layer
from tests.dist.forked import run_ranks

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
# Shares of the experts' time: a gated first linear is twice as wide as the second.
_OF_EXPERTS = {"gate_up": 2 / 3, "down": 1 / 3}


def events(name: str, process: int, times: Sequence[Timed]) -> list[dict[str, Any]]:
    """Complete events in microseconds; a process per schedule, a thread per stream and half."""
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    ]
    for t in times:
        item, network = t.issued, t.issued.op.stream == "send"
        rows.append(
            {
                "name": " ".join((item.op.name, *_part(item), f"L{item.layer}")),
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


def _part(item: Issued) -> tuple[str, ...]:
    return () if item.op.part is None else (f"part {item.op.part}",)


def recorded(group: dist.ProcessGroup, layers: int) -> list[Timed]:
    """Layers of 8 experts a rank, 512 rows of 256 each way, shared experts beside the dispatch."""
    rows, hidden, inner, per_rank = 512, 256, 128, 8
    generator = torch.Generator().manual_seed(group.rank())
    experts = ExpertWeights(
        torch.randn(per_rank, 2 * inner, hidden, generator=generator) / hidden**0.5,
        torch.randn(per_rank, hidden, inner, generator=generator) / inner**0.5,
    )
    dense = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
    exchange = ExpertExchange(group, per_rank, rows, hidden)
    layer = OverlappedLayer(exchange, experts, Activation(), lambda x: x @ dense)
    x = torch.randn(rows, hidden, generator=generator)
    ids = torch.rand(rows, per_rank * group.size(), generator=generator).argsort(dim=1)[:, :4]
    recorder = Recorder()
    exchange.buffer.watch(recorder.sent)
    for _ in range(layers):
        choice = (ids.int(), torch.full(ids.shape, 0.25))
        x = run_layer(layer, lambda r, c: exchange.begin(r, *c), x, choice, recorder)
    return recorder.trace


def _record(layers: int, ranks: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rank, times in enumerate(run_ranks(ranks, recorded, layers)):
        for layer in range(layers):
            mine = [t for t in times if t.issued.layer == layer]
            if faults := trace_faults(mine, inputs=("attended", "choices")):
                raise SystemExit(f"rank {rank}: {faults[0]}")
        rows += events(f"single batch, rank {rank} (recorded)", rank, times)
        print(f"rank {rank}: {hidden_share(times):.0%} of the transfer time beside computation")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    shrinks_not = "share of an operation's time that a half batch does not halve"
    parser.add_argument("--fixed", type=float, default=0.2, help=shrinks_not)
    parser.add_argument("--out", type=Path, default=Path("overlap_trace.json"))
    for name, cost in _COSTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=cost, help="us")
    record = "write what ranks did, in place of the model"
    parser.add_argument("--recorded", action="store_true", help=record)
    parser.add_argument("--ranks", type=int, default=2, help="of --recorded")
    options = parser.parse_args()
    rows = _record(options.layers, options.ranks) if options.recorded else _model(options)
    options.out.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n")


def _model(options: argparse.Namespace) -> list[dict[str, Any]]:
    parts = sum(op.name == "down" for op in SINGLE[0])
    share = options.fixed + (1 - options.fixed) / 2

    def whole(item: Issued) -> float:
        name = item.op.name
        if name in _OF_EXPERTS:
            cost = _OF_EXPERTS[name] * options.experts
        else:
            cost = float(getattr(options, name))
        return 1e-6 * cost / (1 if item.op.part is None else parts)

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
    return rows


if __name__ == "__main__":
    main()
