"""What a model does under two-batch overlap, recorded where it happens: a trace of core.overlap.

Transfers, experts and attention are watched at the objects that carry them out, so that the trace
says nothing of the schedule that a model was given.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.batch_overlap import operations

from sglang_ext.core.overlap import (
    DECODE,
    DECODE_ROUTED,
    PREFILL,
    PREFILL_ROUTED,
    Issued,
    Op,
    Stages,
    Timed,
)
from sglang_ext.core.overlap_run import Recorder
from tests.adapters.model_world import ModelWorld


def _by_name(stages: Stages) -> dict[str, Op]:
    return {op.name: op for stage in stages for op in stage}


class Watch:
    """What the halves of every forward do.

    traces: one per forward. layers: mixture layers, the first is layer 0 of a trace.
    prefill, decode: the stages that the model should follow.
    """

    def __init__(self, world: ModelWorld, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.half = patch, 0
        self.recorders: list[Recorder] = []
        forward, run_stage = ModelWorld._forward, operations._StageExecutor.next

        def recorded(world: ModelWorld, batch: Any) -> Any:
            self.recorders.append(Recorder())
            return forward(world, batch)

        def of_half(executor: Any) -> None:
            self.half = "ab".index(executor._debug_name)
            run_stage(executor)

        patch.setattr(ModelWorld, "_forward", recorded)
        patch.setattr(operations._StageExecutor, "next", of_half)
        layers: Any = world.model.model.layers
        mixtures = [one for one in layers if hasattr(getattr(one, "mlp", None), "experts")]
        self.layers = len(mixtures or layers)
        # V4's layers are all mixtures with shared experts.
        shared = not mixtures or hasattr(mixtures[0].mlp, "shared_experts")
        self.prefill, self.decode = (PREFILL, DECODE) if shared else (PREFILL_ROUTED, DECODE_ROUTED)
        # What prepares attention is a turn of its own in a decode step.
        self._ops = _by_name(self.decode) | _by_name(self.prefill)
        for number, layer in enumerate(mixtures or layers):
            self._watch(layer, number)

    @property
    def traces(self) -> list[list[Timed]]:
        return [recorder.trace for recorder in self.recorders]

    def _watch(self, layer: Any, number: int) -> None:
        """V4 has attn and ffn, V3.2 and Qwen3-MoE self_attn and mlp; the last is SGLang's own."""
        v4 = hasattr(layer, "ffn")
        experts_of = layer.ffn if v4 else layer.mlp
        dispatcher = experts_of.experts.dispatcher
        attention = layer.attn if v4 else layer.self_attn
        if hasattr(attention, "forward_core"):
            self._tell(attention, "forward_prepare", "prepare", number)
            self._tell(attention, "forward_core", "attention", number)
        else:
            self._tell(attention, "forward", "attention", number)
        self._tell(experts_of.gate, "forward", "gate", number)
        for name in ("dispatch_a", "dispatch_b", "combine_a", "combine_b"):
            self._tell(dispatcher, name, name, number)
        self._tell(experts_of.experts, "run_moe_core", "experts", number)
        if "shared_experts" in self._ops:
            self._tell(experts_of.shared_experts, "forward", "shared_experts", number)
        if v4:
            self._tell(experts_of.rows, "back", "output", number)
        else:
            self._tell(layer.ffn_boundary, "complete_now", "output", number)
        dispatcher.exchange.buffer.watch(lambda: self.recorders[-1].sent())

    def _tell(self, owner: Any, method: str, name: str, layer: int) -> None:
        original, op = getattr(owner, method), self._ops[name]

        def told(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorders[-1]
            place = recorder.begin(op, self.half, layer)
            out = original(*args, **kwargs)
            if op.stream != "send":
                recorder.end(place)
            return out

        self.patch.setattr(owner, method, told)


def issued(trace: list[Timed]) -> list[Issued]:
    return [t.issued for t in trace]


def serially(run: Any) -> Any:
    """Of `execute_overlapped_operations`: one half after the other, as without yields."""

    def execute(inputs_arr: Any, operations_arr: Any, delta_stages: Any) -> Any:
        joined = [
            [step for step in steps if not isinstance(step, operations.YieldOperation)]
            for steps in operations_arr
        ]
        return run(inputs_arr=inputs_arr, operations_arr=joined, delta_stages=[0, 0])

    return execute
