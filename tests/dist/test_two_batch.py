"""Two-batch overlap of layers of experts over ranks: its trace, and the rows of a plain order."""

from __future__ import annotations

import pytest
import torch

from bench.overlap_trace import halves
from sglang_ext.core.overlap import (
    BEHIND_IN_DECODE,
    BEHIND_IN_PREFILL,
    DECODE,
    PREFILL,
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
    ("stages", "behind"), [(PREFILL, BEHIND_IN_PREFILL), (DECODE, BEHIND_IN_DECODE)]
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
