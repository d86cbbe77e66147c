"""The stages of `core.overlap` as SGLang's operations of one layer, for two-batch overlap.

SGLang   a list of callables and yields per layer, called with a half's state and what the
         callable before returned
here     the order is that of `PREFILL` or `DECODE`; a layer brings its steps by name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.batch_overlap.operations import YieldOperation
from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

from sglang_ext.core.overlap import (
    BEHIND_IN_DECODE,
    BEHIND_IN_PREFILL,
    DECODE,
    PREFILL,
    Stages,
)
from sglang_ext.srt.parallel.seen import note

Step = Callable[..., Any]
# By the name of an operation of `core.overlap`.
Steps = Mapping[str, Sequence[Step]]


def in_order(stages: Stages, steps: Steps) -> list[Any]:
    """Steps by the order of `stages`, with a yield between two stages for the other half.

    Behind the last there is none: the next layer's first stage belongs to it.
    """
    operations: list[Any] = []
    for number, stage in enumerate(stages):
        operations += [YieldOperation()] if number else []
        operations += [step for op in stage for step in steps[op.name]]
    return operations


def prefill_order(steps: Steps) -> OperationsStrategy:
    """A layer's operations in a prefill, where what prepares attention is one stage with it."""
    note("two-batch split of a prefill")
    whole = {**steps, "attention": [*steps["prepare"], *steps["attention"]]}
    return OperationsStrategy(in_order(PREFILL, whole), tbo_delta_stages=BEHIND_IN_PREFILL)


def mixture_order(
    layer_id: int, experts: Any, forward_mode: Any, steps: Mapping[str, Step]
) -> OperationsStrategy:
    """The operations of a layer of ours in a prefill, or in a decode step or a verification.

    experts: its routed experts, whose exchange makes the steps that `_exchange_steps` names.
    steps: all others, by the name of their operation.
    """
    own = {name: [step] for name, step in steps.items()}
    every = _of_layer(layer_id, {**own, **_exchange_steps(experts)})
    if forward_mode.is_extend_without_speculative():
        return prefill_order(every)
    note("two-batch split of a decode")
    return OperationsStrategy(in_order(DECODE, every), tbo_delta_stages=BEHIND_IN_DECODE)


def _of_layer(layer_id: int, steps: Steps) -> Steps:
    """The same steps, told to SGLang's recorder of expert choices as this layer's."""

    def told(step: Step) -> Step:
        def run(**given: Any) -> Any:
            with get_global_expert_distribution_recorder().with_current_layer(layer_id):
                return step(**given)

        run.__name__ = step.__name__
        return run

    return {name: [told(step) for step in run] for name, run in steps.items()}


def _exchange_steps(experts: Any) -> dict[str, Sequence[Step]]:
    """The steps of a layer of experts that its exchange makes.

    state.half: which one. state.rows, state.choice: what travels, taken from the state.
    state.routed: what came back, [rows, hidden].
    """
    dispatcher = experts.dispatcher

    def dispatch_a(state: Any) -> None:
        dispatcher.dispatch_a(
            hidden_states=state.pop("rows"),
            topk_output=state.pop("choice"),
            tbo_subbatch_index=state.half,
        )

    def dispatch_b(state: Any) -> None:
        state.arrived = dispatcher.dispatch_b(tbo_subbatch_index=state.half)

    def compute(state: Any) -> None:
        state.computed = experts.run_moe_core(dispatch_output=state.pop("arrived"))

    def combine_a(state: Any) -> None:
        dispatcher.combine_a(combine_input=state.pop("computed"), tbo_subbatch_index=state.half)

    def combine_b(state: Any) -> None:
        state.routed = dispatcher.combine_b(tbo_subbatch_index=state.half)

    return {
        "dispatch_a": [dispatch_a],
        "dispatch_b": [dispatch_b],
        "experts": [compute],
        "combine_a": [combine_a],
        "combine_b": [combine_b],
    }
