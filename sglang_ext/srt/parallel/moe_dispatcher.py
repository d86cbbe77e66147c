"""SGLang's expert dispatcher for `--moe-a2a-backend deepep` where deep_ep cannot run.

    SGLang     dispatch(hidden_states, topk_output) -> DispatchOutput; combine(input) -> rows,
               each in two halves (_a, _b) and two sub-batches under two-batch overlap
    exchange   send(hidden, ids, weights) -> Arrived; collect(outputs, journey) -> rows
The difference absorbed here: the halves (the exchange happens in the second), the sub-batch index,
and rows that reach the experts as SGLang's standard dispatch output with local ids.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import get_deepep_mode
from sglang.srt.runtime_context import get_parallel

from sglang_ext.srt.parallel.expert_exchange import ExpertExchange, Journey
from sglang_ext.srt.parallel.seen import note
from sglang_ext.srt.parallel.traffic import meter

# Two sub-batches at most; without overlap SGLang passes none.
_SUB_BATCHES = 2


class _InFlight:
    """What one sub-batch has begun and not finished."""

    def __init__(self) -> None:
        self.sent: tuple[torch.Tensor, Any] | None = None
        self.journey: Journey | None = None
        self.low_latency = False
        self.outputs: torch.Tensor | None = None


class ExchangeDispatcher(BaseDispatcher):
    """All-to-all of one MoE layer over the tensor-parallel group.

    Raises:
        NotImplementedError: shared experts fused into the routed ones.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.num_fused_shared_experts:
            raise NotImplementedError(
                "num_fused_shared_experts: expected 0 with --moe-a2a-backend deepep, found "
                f"{config.num_fused_shared_experts}; start with --disable-shared-experts-fusion"
            )
        self.mode = get_deepep_mode()
        if config.apply_router_weight_on_input and self.mode.enable_low_latency():
            raise NotImplementedError(
                "apply_router_weight_on_input: expected False with low-latency exchange, whose "
                "gate weights come after the experts, found True; use --deepep-mode normal"
            )
        limit = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        group = get_parallel().tp_group.device_group
        self.exchange = ExpertExchange(group, config.num_local_experts, limit, config.hidden_size)
        self.meter = meter(self.exchange.buffer)
        self._in_flight = [_InFlight() for _ in range(_SUB_BATCHES)]

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(
        self,
        hidden_states: torch.Tensor,
        topk_output: Any,
        tbo_subbatch_index: int | None = None,
    ) -> None:
        self._in_flight[tbo_subbatch_index or 0].sent = (hidden_states, topk_output)

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> StandardDispatchOutput:
        state = self._in_flight[tbo_subbatch_index or 0]
        assert state.sent is not None
        (hidden, topk), state.sent = state.sent, None
        state.low_latency = self.mode.resolve(get_is_extend_in_batch()).is_low_latency()
        send = self.exchange.send_low_latency if state.low_latency else self.exchange.send
        arrived = send(hidden, topk.topk_ids, topk.topk_weights)
        state.journey = arrived.journey
        _note_use(state, arrived.journey)
        choice = StandardTopKOutput(arrived.weights, arrived.ids, None)
        return StandardDispatchOutput(arrived.hidden, None, choice)

    def combine(self, combine_input: Any) -> torch.Tensor:
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any, tbo_subbatch_index: int | None = None) -> None:
        self._in_flight[tbo_subbatch_index or 0].outputs = combine_input.hidden_states

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        state = self._in_flight[tbo_subbatch_index or 0]
        assert state.outputs is not None
        assert state.journey is not None
        outputs, journey = state.outputs, state.journey
        state.outputs = state.journey = None
        rows = self.exchange.collect(outputs, journey)
        if self.meter is not None:
            self.meter.read()
        return rows


def _note_use(state: _InFlight, journey: Journey) -> None:
    note("low-latency expert exchange" if state.low_latency else "normal expert exchange")
    if journey.sent == 0:
        note("empty send to the experts")
    if journey.received == 0:
        note("empty arrival at the experts")
