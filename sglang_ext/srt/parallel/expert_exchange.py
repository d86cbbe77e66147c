"""Rows travel to the ranks of their experts and back, over `torch.distributed` alone.

Two contracts, DeepEP's (facts of its `Buffer` interface, not its code):
    normal       one copy of a row per destination RANK; the expert side applies the gate weights
                 and sums, the way back is a plain sum over ranks
    low latency  one copy per (row, expert); the expert side returns bare outputs, the way back is
                 the sum weighted with the gate weights, and a rank sends at most `max_rows` rows
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Experts:
    """Where the experts live: rank r of the group holds `per_rank` of them, from r * per_rank."""

    ranks: int
    rank: int
    per_rank: int

    def owners(self, ids: Tensor) -> Tensor:
        """[rows, top_k] expert ids -> their ranks; a negative id stays -1."""
        return torch.where(ids < 0, -1, ids // self.per_rank)


@dataclass(frozen=True)
class Journey:
    """What went where, so that it can come back.

    sources: [sent] int64, row of each sent copy, grouped by destination rank
    sent, received: copies per rank of the group
    rows: rows this rank started with
    weights: None, or [sent] float32 gate weight of each copy (low latency)
    """

    sources: Tensor
    sent: list[int]
    received: list[int]
    rows: int
    weights: Tensor | None = None


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
        self.group = group
        self.experts = Experts(group.size(), group.rank(), per_rank)
        self.max_rows = max_rows

    def send(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Arrived:
        """Normal mode. hidden [rows, hidden]; ids, weights [rows, top_k]; rows may be 0."""
        owners = self.experts.owners(ids)
        wanted = _ranks_wanted(owners, self.experts.ranks)
        destinations, sources = wanted.T.nonzero(as_tuple=True)
        sent = torch.bincount(destinations, minlength=self.experts.ranks).tolist()
        here = owners[sources] == destinations[:, None]
        local = torch.where(here, ids[sources] - destinations[:, None] * self.experts.per_rank, -1)
        kept = weights[sources].float()
        return self._travel(hidden, local, kept, sources, sent, None)

    def collect(self, outputs: Tensor, journey: Journey) -> Tensor:
        """Normal mode. Expert-side sums [received, hidden] -> [rows, hidden], summed over ranks."""
        return self._return(outputs, journey)

    def send_low_latency(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Arrived:
        """Low-latency mode; see `send`.

        Raises:
            ValueError: more rows than `max_rows`.
        """
        if hidden.shape[0] > self.max_rows:
            raise ValueError(
                f"low-latency dispatch: expected at most {self.max_rows} rows per rank "
                f"(SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK), found {hidden.shape[0]}. "
                "Raise it, or lower --max-running-requests, --chunked-prefill-size or the draft "
                "length, or use --deepep-mode normal."
            )
        rows, columns = (ids >= 0).nonzero(as_tuple=True)
        chosen = ids[rows, columns].long()
        order = torch.argsort(chosen, stable=True)
        rows, columns, chosen = rows[order], columns[order], chosen[order]
        owners = chosen // self.experts.per_rank
        sent = torch.bincount(owners, minlength=self.experts.ranks).tolist()
        local = (chosen - owners * self.experts.per_rank)[:, None]
        gate = weights[rows, columns].float()
        return self._travel(hidden, local, torch.ones_like(local).float(), rows, sent, gate)

    def collect_low_latency(self, outputs: Tensor, journey: Journey) -> Tensor:
        """Bare expert outputs [received, hidden] -> [rows, hidden], the weighted sum."""
        return self._return(outputs, journey)

    def _travel(
        self,
        hidden: Tensor,
        local: Tensor,
        weights: Tensor,
        sources: Tensor,
        sent: list[int],
        gate: Tensor | None,
    ) -> Arrived:
        received = self._exchange_counts(sent)
        rows = self._exchange(hidden[sources], sent, received)
        # Ids and weights share one message: their bits are carried as float32.
        labels = torch.cat((local.to(torch.int32).view(torch.float32), weights), dim=1)
        arrived = self._exchange(labels, sent, received)
        width = local.shape[1]
        ids = arrived[:, :width].contiguous().view(torch.int32)
        journey = Journey(sources, sent, received, hidden.shape[0], gate)
        return Arrived(rows, ids, arrived[:, width:].contiguous(), journey)

    def _return(self, outputs: Tensor, journey: Journey) -> Tensor:
        back = self._exchange(outputs, journey.received, journey.sent).float()
        if journey.weights is not None:
            back = back * journey.weights[:, None]
        total = torch.zeros(journey.rows, outputs.shape[1], device=outputs.device)
        # Copies lie in rank (or expert) order, so a row's terms are always added in that order.
        return total.index_add_(0, journey.sources, back).to(outputs.dtype)

    def _exchange_counts(self, sent: list[int]) -> list[int]:
        counts = torch.tensor(sent, dtype=torch.int64)
        answer = torch.empty_like(counts)
        dist.all_to_all_single(answer, counts, group=self.group)
        return [int(n) for n in answer.tolist()]

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


def _ranks_wanted(owners: Tensor, ranks: int) -> Tensor:
    """[rows, top_k] owners, -1 for none -> [rows, ranks] bool."""
    wanted = torch.zeros(owners.shape[0], ranks + 1, dtype=torch.bool, device=owners.device)
    return wanted.scatter_(1, owners.long() + 1, True)[:, 1:]
