"""Rows travel to the ranks of their experts and back, for one layer of a model.

Which copy goes where is core/dispatch.py's, what carries it is row_exchange.py's. Here the two make
one journey in each of DeepEP's modes, in the form that experts computed rank by rank can take:
    normal       a row arrives once per rank, with its local experts and gate weights; the experts'
                 weighted sum goes back and is added up over ranks
    low latency  a row arrives once per expert, unweighted; its output goes back and is added up
                 with the gate weights
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_ext.core.dispatch import (
    Copies,
    DispatchError,
    ExpertShards,
    layout,
    low_latency_copies,
    normal_copies,
    sum_copies,
)
from sglang_ext.srt.parallel.row_exchange import RowExchange, Traffic


@dataclass(frozen=True)
class Journey:
    """What went where, so that it can come back.

    copies: what was sent
    received: copies from each rank
    rows: rows this rank started with
    gates: None, or [rows, top_k] gate weights to add up with (low latency)
    """

    copies: Copies
    received: list[int]
    rows: int
    gates: Tensor | None


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


class ExpertExchange:
    """All-to-all of one expert group.

    Args:
        group: process group whose ranks hold the experts in order.
        per_rank: experts per rank, redundant copies included.
        max_rows: most rows a rank may send at once in low-latency mode.
    """

    def __init__(self, group: dist.ProcessGroup, per_rank: int, max_rows: int) -> None:
        self.carrier = RowExchange(group)
        self.shards = ExpertShards(per_rank * group.size(), group.size())
        self.max_rows = max_rows
        self.traffic = Traffic()

    def send(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Arrived:
        """Normal mode. hidden [rows, hidden]; ids, weights [rows, top_k]; rows may be 0."""
        plan = layout(ids, self.shards)
        copies = normal_copies(plan.in_rank, plan.tokens_per_expert)
        chosen = ids[copies.rows]
        destinations = copies.destinations()[:, None]
        here = self.shards.owners(chosen) == destinations
        local = torch.where(here, chosen - destinations * self.shards.per_rank, -1)
        kept = weights[copies.rows].float()
        return self._travel(hidden, local, kept, copies, None)

    def send_low_latency(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Arrived:
        """Low-latency mode; see `send`.

        Raises:
            DispatchError: more rows than `max_rows`.
        """
        if hidden.shape[0] > self.max_rows:
            raise DispatchError(
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
                expected=f"at least the rows of one low-latency exchange ({self.max_rows} fit)",
                found=hidden.shape[0],
                remedy="Raise it, or lower --max-running-requests, --chunked-prefill-size or the "
                "draft length, or use --deepep-mode normal.",
            )
        copies = low_latency_copies(ids, self.shards)
        assert copies.choices is not None
        local = ids[copies.rows, copies.choices] % self.shards.per_rank
        ones = torch.ones(local.shape[0], 1, device=hidden.device)
        return self._travel(hidden, local[:, None], ones, copies, weights)

    def collect(self, outputs: Tensor, journey: Journey) -> Tensor:
        """What the experts made of arrived rows [received, hidden] -> [rows, hidden], added up."""
        sent, received = journey.copies.per_rank, journey.received
        (back,) = self.carrier.rows([outputs], received, sent, self.traffic)()
        return sum_copies(back, journey.copies, journey.rows, journey.gates).to(outputs.dtype)

    def _travel(
        self,
        hidden: Tensor,
        local: Tensor,
        weights: Tensor,
        copies: Copies,
        gates: Tensor | None,
    ) -> Arrived:
        sent = torch.tensor(copies.per_rank, dtype=torch.int64, device=hidden.device)
        received = self.carrier.counts(sent[:, None])[:, 0].tolist()
        columns = [hidden[copies.rows], local.to(torch.int32), weights]
        rows, ids, kept = self.carrier.rows(columns, copies.per_rank, received, self.traffic)()
        journey = Journey(copies, received, hidden.shape[0], gates)
        return Arrived(rows, ids, kept, journey)
