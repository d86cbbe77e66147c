"""SGLang's expert dispatcher for `--moe-a2a-backend deepep` where deep_ep cannot run.

    SGLang     dispatch(hidden_states, topk_output) -> DispatchOutput; combine(input) -> rows,
               each in two halves (_a, _b) and two sub-batches under two-batch overlap
    exchange   begin(hidden, ids, weights) and begin_collect(outputs, journey), each a call that
               waits for what the other ranks sent
The difference absorbed here: the halves (a transfer begins in the first, and is waited for in the
second), the sub-batch index, and rows that reach the experts as SGLang's standard dispatch output
with local ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import get_deepep_mode
from sglang.srt.runtime_context import get_parallel

from sglang_ext.srt.parallel.expert_exchange import (
    Arrived,
    ExpertExchange,
    Journey,
    LowLatencyJourney,
)
from sglang_ext.srt.parallel.seen import note
from sglang_ext.srt.parallel.traffic import meter

# Two sub-batches at most; without overlap SGLang passes none.
_SUB_BATCHES = 2


class _InFlight:
    """What one sub-batch has begun and not finished."""

    def __init__(self) -> None:
        self.arrive: Callable[[], Arrived] | None = None
        self.journey: Journey | None = None
        self.collect: Callable[[], torch.Tensor] | None = None


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
        self._in_flight[tbo_subbatch_index or 0].arrive = self.begin(hidden_states, topk_output)

    def begin(self, hidden: torch.Tensor, topk: Any) -> Callable[[], Arrived]:
        """Rows [rows, hidden] start to travel, in the mode of the batch at hand."""
        low_latency = self.mode.resolve(get_is_extend_in_batch()).is_low_latency()
        exchange = self.exchange
        begin = exchange.begin_low_latency if low_latency else exchange.begin
        wait = begin(hidden, topk.topk_ids, topk.topk_weights)

        def arrive() -> Arrived:
            arrived = wait()
            _note_use(arrived.journey)
            return arrived

        return arrive

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> StandardDispatchOutput:
        state = self._in_flight[tbo_subbatch_index or 0]
        assert state.arrive is not None
        arrived, state.arrive = state.arrive(), None
        state.journey = arrived.journey
        choice = StandardTopKOutput(arrived.weights, arrived.ids, None)
        return StandardDispatchOutput(arrived.hidden, None, choice)

    def combine(self, combine_input: Any) -> torch.Tensor:
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any, tbo_subbatch_index: int | None = None) -> None:
        state = self._in_flight[tbo_subbatch_index or 0]
        assert state.journey is not None
        state.collect = self.exchange.begin_collect(combine_input.hidden_states, state.journey)
        state.journey = None

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        state = self._in_flight[tbo_subbatch_index or 0]
        assert state.collect is not None
        rows, state.collect = state.collect(), None
        self.count()
        return rows

    def count(self) -> None:
        """Bring the metrics up to what has been sent."""
        if self.meter is not None:
            self.meter.read()


def _note_use(journey: Journey) -> None:
    slots = isinstance(journey, LowLatencyJourney)
    note("low-latency expert exchange" if slots else "normal expert exchange")
    if journey.sent == 0:
        note("empty send to the experts")
    if journey.received == 0:
        note("empty arrival at the experts")
