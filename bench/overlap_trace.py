"""What two-batch and single-batch overlap can earn in a model, and a trace to look at.

Writes trace events that Perfetto (ui.perfetto.dev) and chrome://tracing read. Durations are given
by hand or fitted elsewhere: the result is a model of one compute and one communication stream, not
a measurement. Every schedule must be free of hazards before it is timed.

With --recorded it writes what ranks over gloo did instead: experts of random weights under
single-batch and two-batch overlap, in the order that a served model follows (DeepSeek-V3.2 and V4
with their shared experts, Qwen3-MoE without). That shows the order, not a speed: the ranks share
this machine's cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_ext.core.overlap import (
    BEHIND_IN_DECODE,
    BEHIND_IN_PREFILL,
    DECODE,
    DECODE_ROUTED,
    PREFILL,
    PREFILL_ROUTED,
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
from sglang_ext.core.overlap_run import Recorder, perform_halves
from sglang_ext.kernels.moe import Activation, ExpertWeights, Routing, routed_experts
from sglang_ext.srt.parallel.expert_exchange import Arrived, ExpertExchange
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
# By name: the stages of both halves, and how far the second is behind.
_TWO_BATCH = {
    "two batch, prefill": (PREFILL, BEHIND_IN_PREFILL),
    "two batch, decode": (DECODE, BEHIND_IN_DECODE),
}
_OF_QWEN = {
    "two batch, prefill of Qwen3-MoE": (PREFILL_ROUTED, BEHIND_IN_PREFILL),
    "two batch, decode of Qwen3-MoE": (DECODE_ROUTED, BEHIND_IN_DECODE),
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


@dataclass(frozen=True)
class _Rank:
    """512 rows of 256, 8 experts a rank, 4 choices a row, a shared expert; the same every layer."""

    exchange: ExpertExchange
    experts: ExpertWeights
    dense: Tensor
    x: Tensor
    choice: tuple[Tensor, Tensor]

    def shared(self, rows: Tensor) -> Tensor:
        return rows @ self.dense


def _make(group: dist.ProcessGroup) -> _Rank:
    rows, hidden, inner, per_rank = 512, 256, 128, 8
    generator = torch.Generator().manual_seed(group.rank())
    experts = ExpertWeights(
        torch.randn(per_rank, 2 * inner, hidden, generator=generator) / hidden**0.5,
        torch.randn(per_rank, hidden, inner, generator=generator) / inner**0.5,
    )
    dense = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
    x = torch.randn(rows, hidden, generator=generator)
    ids = torch.rand(rows, per_rank * group.size(), generator=generator).argsort(dim=1)[:, :4]
    exchange = ExpertExchange(group, per_rank, rows, hidden)
    return _Rank(exchange, experts, dense, x, (ids.int(), torch.full(ids.shape, 0.25)))


def single(group: dist.ProcessGroup, layers: int) -> list[Timed]:
    """Single-batch overlap; the trace."""
    rank, recorder = _make(group), Recorder()
    exchange, x = rank.exchange, rank.x
    layer = OverlappedLayer(exchange, rank.experts, Activation(), rank.shared)
    exchange.buffer.watch(recorder.sent)
    for _ in range(layers):
        x = run_layer(layer, lambda r, c: exchange.begin(r, *c), x, rank.choice, recorder)
    exchange.buffer.watch(None)
    return recorder.trace


def halves(group: dist.ProcessGroup, schedule: Sequence[Issued]) -> tuple[list[Timed], Tensor]:
    """Two-batch overlap: the trace, and what the layers make of the rows."""
    rank, recorder = _make(group), Recorder()
    exchange, half = rank.exchange, len(rank.x) // 2

    def experts(arrived: Arrived) -> tuple[Tensor, Any]:
        local = Routing(arrived.weights, arrived.ids)
        return routed_experts(arrived.hidden, rank.experts, local, Activation()), arrived.journey

    steps: dict[str, Callable[..., Any]] = {
        "prepare": lambda hidden: hidden,
        # In the place of attention, a product of the size of its last one.
        "attention": lambda rows: rows + rank.shared(rows),
        "gate": lambda rows: tuple(part[: len(rows)] for part in rank.choice),
        "dispatch_a": lambda rows, choice: exchange.begin(rows, *choice),
        "shared_experts": rank.shared,
        "experts": experts,
        "combine_a": lambda outputs: exchange.begin_collect(*outputs),
        "output": lambda *parts: torch.nn.functional.normalize(sum(parts[1:], parts[0])),
    }
    exchange.buffer.watch(recorder.sent)
    buffers = ({"hidden": rank.x[:half]}, {"hidden": rank.x[half:]})
    perform_halves(schedule, steps, buffers, recorder)
    exchange.buffer.watch(None)
    return recorder.trace, torch.cat([one["hidden"] for one in buffers])


def _record(layers: int, ranks: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    alone = run_ranks(ranks, single, layers)
    for rank, times in enumerate(alone):
        for layer in range(layers):
            mine = [t for t in times if t.issued.layer == layer]
            _held(rank, trace_faults(mine, inputs=("attended", "choices")))
    runs = {"single batch": alone}
    for name, (stages, behind) in (_TWO_BATCH | _OF_QWEN).items():
        recorded = run_ranks(ranks, halves, two_batch(stages, layers, behind))
        runs[name] = [trace for trace, _ in recorded]
    for number, (name, traces) in enumerate(runs.items()):
        for rank, times in enumerate(traces):
            if number:
                _held(rank, trace_faults(times))
            rows += events(f"{name}, rank {rank} (recorded)", number * ranks + rank, times)
            share = f"{hidden_share(times):.0%} of the transfer time beside computation"
            print(f"{name}, rank {rank}: {share}")
    return rows


def _held(rank: int, faults: Sequence[str]) -> None:
    if faults:
        raise SystemExit(f"rank {rank}: {faults[0]}")


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
    }
    for name, (stages, behind) in _TWO_BATCH.items():
        runs[name] = (two_batch(stages, options.layers, behind), half)
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
