"""Two-batch overlap of layers of experts over ranks: its trace, and the rows of a plain order."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from bench.overlap_trace import halves, main
from sglang_ext.core.overlap import (
    BEHIND_IN_DECODE,
    BEHIND_IN_PREFILL,
    DECODE,
    DECODE_ROUTED,
    PREFILL,
    PREFILL_ROUTED,
    Issued,
    Stages,
    exposed,
    one_batch,
    trace_faults,
    two_batch,
)
from tests.dist.forked import run_ranks

LAYERS = 3


@pytest.mark.parametrize(
    ("stages", "behind"),
    [
        (PREFILL, BEHIND_IN_PREFILL),
        (DECODE, BEHIND_IN_DECODE),
        (PREFILL_ROUTED, BEHIND_IN_PREFILL),
        (DECODE_ROUTED, BEHIND_IN_DECODE),
    ],
)
def test_a_half_travels_while_the_other_computes(stages: Stages, behind: int) -> None:
    schedule = two_batch(stages, LAYERS, behind)
    first = one_batch(stages, LAYERS)
    serial = [*first, *(Issued(1, i.layer, i.op) for i in first)]
    plain = run_ranks(2, halves, serial)
    for (trace, rows), (after, expected) in zip(run_ranks(2, halves, schedule), plain, strict=True):
        assert [t.issued for t in trace] == schedule
        assert trace_faults(trace) == trace_faults(after) == []
        assert torch.equal(rows, expected)
        assert {layer for _, layer, _ in exposed(schedule)} <= {0, LAYERS - 1}
        assert len(exposed([t.issued for t in after])) == 4 * LAYERS


def test_the_recorded_traces_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "trace.json"
    argv = ["overlap_trace", "--recorded", "--layers", "2", "--ranks", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    main()
    events = json.loads(out.read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["ph"] == "M"]
    orders = ("single batch", "two batch, prefill", "two batch, decode")
    orders += tuple(f"two batch, {what} of Qwen3-MoE" for what in ("prefill", "decode"))
    assert named == [f"{one}, rank {rank} (recorded)" for one in orders for rank in (0, 1)]
    done = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in done} == set(range(len(named)))
    assert {e["cat"] for e in done} == {"compute", "communication", "wait"}
    assert all(math.isfinite(e["ts"]) and 0 <= e["dur"] < math.inf for e in done)
