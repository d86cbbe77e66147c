"""Rows travel to the ranks of their experts and back, for one layer of a model.

    Buffer   deep_ep's calls: normal mode by tokens, low latency in slots [E/R, M*R, H]
    experts  rows [N, H], local ids [N, K] and gate weights [N, K] in; rows [N, H] out
The difference absorbed here:
    normal       the rows received are the experts' input; their weighted sum goes back and is
                 added up over ranks
    low latency  the slots in use, an expert at a time and unweighted, are the experts' input; an
                 output takes its row's slot, and the way back adds up with the gate weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from sglang_ext.srt.parallel.deep_ep_buffer import Buffer
from sglang_ext.srt.parallel.deep_ep_types import LowLatencyHandle, NormalHandle


@dataclass(frozen=True)
class NormalJourney:
    """handle: of the dispatch; ids: [sent, K], the router's choice; received: rows that arrived."""

    handle: NormalHandle
    ids: Tensor
    received: int

    @property
    def sent(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class LowLatencyJourney:
    """A journey in slots.

    handle: of the dispatch
    slots: [E/R, M*R, H], what was received
    used: ([received], [received]) int64, expert and slot of each row the experts compute
    ids, weights: [sent, K], the router's choice
    """

    handle: LowLatencyHandle
    slots: Tensor
    used: tuple[Tensor, Tensor]
    ids: Tensor
    weights: Tensor

    @property
    def sent(self) -> int:
        return len(self.ids)

    @property
    def received(self) -> int:
        return len(self.used[0])


Journey = NormalJourney | LowLatencyJourney


@dataclass(frozen=True)
class Arrived:
    """Rows for this rank's experts.

    hidden: [received, hidden]
    ids: [received, choices] int32, local expert numbers, -1 for an expert elsewhere
    weights: [received, choices] float32
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    journey: Journey


@cache
def shared_buffer(group: dist.ProcessGroup, max_rows: int, hidden: int, experts: int) -> Buffer:
    """The buffer that all layers of one shape share, so that two receive buffers are live."""
    room = Buffer.get_low_latency_rdma_size_hint(max_rows, hidden, group.size(), experts)
    return Buffer(group, num_rdma_bytes=room, low_latency_mode=True)


class ExpertExchange:
    """All-to-all of one expert group.

    Args:
        group: process group whose ranks hold the experts in order.
        per_rank: experts per rank, redundant copies included.
        max_rows: most rows a rank may send at once in low-latency mode.
        hidden: width of a row.
    """

    def __init__(self, group: dist.ProcessGroup, per_rank: int, max_rows: int, hidden: int) -> None:
        self.experts = per_rank * group.size()
        self.max_rows = max_rows
        self.hidden = hidden
        self.buffer = shared_buffer(group, max_rows, hidden, self.experts)

    def begin(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Arrived]:
        """Normal mode: rows start to travel; the call returned waits for those of other ranks.

        Args:
            hidden: [rows, hidden]; rows may be 0.
            ids, weights: [rows, top_k]; fewer rows where the last of `hidden` are padding.
        """
        ids, weights = _with_padding(len(hidden), ids, weights)
        finish = self.buffer.begin_dispatch(hidden, ids.to(torch.int32), weights, self.experts)

        def arrive() -> Arrived:
            found = finish()
            rows, local, kept = found.x, found.topk_idx, found.topk_weights
            assert isinstance(rows, Tensor)
            assert local is not None
            assert kept is not None
            return Arrived(rows, local, kept, NormalJourney(found.handle, ids, len(rows)))

        return arrive

    def begin_low_latency(
        self, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Callable[[], Arrived]:
        """Low-latency mode; see `begin`.

        Raises:
            DispatchError: more rows than `max_rows` on any rank; all of them raise.
        """
        ids, weights = _with_padding(len(hidden), ids, weights)
        if not self.buffer.is_clean:
            self.buffer.clean_low_latency_buffer(self.max_rows, self.hidden, self.experts)
        slots, counts, handle, _, wait = self.buffer.low_latency_dispatch(
            hidden, ids, self.max_rows, self.experts, use_fp8=False, return_recv_hook=True
        )
        assert isinstance(slots, Tensor)
        assert wait is not None

        def arrive() -> Arrived:
            wait()
            # An expert's slots fill from the first.
            filled = torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
            expert, slot = filled.nonzero(as_tuple=True)
            journey = LowLatencyJourney(handle, slots, (expert, slot), ids, weights)
            ones = torch.ones(len(expert), 1, device=slots.device)
            return Arrived(slots[expert, slot], expert.int()[:, None], ones, journey)

        return arrive

    def begin_collect(self, outputs: Tensor, journey: Journey) -> Callable[[], Tensor]:
        """Outputs [received, hidden] start to travel; the call returned gives [rows, hidden]."""
        if isinstance(journey, NormalJourney):
            return self.buffer.begin_combine(outputs, journey.handle)
        # What was received is read: its slots take the outputs.
        journey.slots[journey.used] = outputs
        total, _, finish = self.buffer.low_latency_combine(
            journey.slots, journey.ids, journey.weights, journey.handle, return_recv_hook=True
        )
        assert finish is not None

        def collect() -> Tensor:
            finish()
            return total

        return collect


def _with_padding(rows: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choices for `rows` rows: SGLang makes none for the padding of an idle rank."""
    missing = rows - len(ids)
    if not missing:
        return ids, weights
    below = (0, 0, 0, missing)
    return functional.pad(ids, below, value=-1), functional.pad(weights, below)
