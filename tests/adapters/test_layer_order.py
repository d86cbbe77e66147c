"""Orders that Qwen3-MoE is served in under two-batch overlap: a half hides the other's rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from sglang.srt.batch_overlap.operations import YieldOperation
from sglang.srt.batch_overlap.operations_strategy import (
    OperationsStrategy,
    _compute_moe_qwen3_decode,
)

from sglang_ext.core.overlap import (
    BEHIND_IN_PREFILL,
    DECODE,
    PREFILL,
    Issued,
    exposed,
    hazards,
    two_batch,
)
from sglang_ext.srt.parallel.two_batch import prefill_strategy

LAYERS = 4
_OPS = {op.name: op for stages in (DECODE, PREFILL) for stage in stages for op in stage}
# SGLang's step -> the operation it ends.
_ENDS = {name: name for name in _OPS} | {"core": "attention", "select_experts": "gate"}
del _ENDS["gate"]


class _Layer:
    """Of Qwen3-MoE, which has no shared experts: steps that tell their name."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.self_attn = self.mlp = self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("op_") or name == "op_shared_experts":
            raise AttributeError(name)
        return self.number, name.removeprefix("op_")


def _issued(strategy: OperationsStrategy, *, yields: bool = True) -> list[Issued]:
    """Both halves in turn, as SGLang's executor runs them."""
    groups = groupby(strategy.operations, lambda step: yields and isinstance(step, YieldOperation))
    stages = [list(steps) for bar, steps in groups if not bar]
    behind = strategy.tbo_delta_stages if yields else 0
    issued: list[Issued] = []
    for turn in range(len(stages) + behind):
        for half, place in ((0, turn), (1, turn - behind)):
            steps = stages[place] if 0 <= place < len(stages) else ()
            for step in steps:
                if not isinstance(step, YieldOperation) and step[1] in _ENDS:
                    issued.append(Issued(half, step[0], _OPS[_ENDS[step[1]]]))
    return issued


def _strategy(of_layer: Callable[[Any], OperationsStrategy]) -> OperationsStrategy:
    return OperationsStrategy.concat([of_layer(_Layer(number)) for number in range(LAYERS)])


@pytest.mark.parametrize("of_layer", [prefill_strategy, _compute_moe_qwen3_decode])
def test_rows_travel_while_the_other_half_computes(of_layer: Callable[[Any], Any]) -> None:
    strategy = _strategy(of_layer)
    issued = _issued(strategy)
    faults = [fault for fault in hazards(issued) if "'shared'" not in fault]
    assert faults == []
    assert {layer for _, layer, _ in exposed(issued)} <= {0, LAYERS - 1}
    assert len(exposed(_issued(strategy, yields=False))) == 4 * LAYERS


def test_a_prefill_is_the_schedule() -> None:
    schedule = two_batch(PREFILL, LAYERS, BEHIND_IN_PREFILL)
    expected = [one for one in schedule if one.op.name != "shared_experts"]
    issued = _issued(_strategy(prefill_strategy))
    assert [one for one in issued if one.op.name != "prepare"] == expected
