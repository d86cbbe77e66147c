"""The way back of expert rows in parts: a row leaves when the last of its experts is done.

    one message   all rows [received, H], when all experts are done
    in parts      rows of one block of experts [n, H] while the next block computes
Both ends know, from the choices that travelled with the rows, which row belongs to which part, so
no counts are exchanged. Parts are put back in the order of one message before they are added up:
the sums have its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_ext.core.dispatch import ExpertBlocks, ExpertShards, sum_copies
from sglang_ext.srt.parallel.deep_ep_buffer import Buffer
from sglang_ext.srt.parallel.expert_exchange import Arrived, NormalJourney


class ReturnInParts:
    """The way back of what has arrived.

    Args:
        buffer: that the rows came through.
        arrived: what the experts are given.
        blocks: the experts of a rank in as many blocks as there are parts.
    """

    def __init__(self, buffer: Buffer, arrived: Arrived, blocks: ExpertBlocks) -> None:
        self.arrived = arrived
        self._buffer = buffer
        journey, ranks = arrived.journey, buffer.group_size
        copies = journey.handle.copies
        destinations, chosen = copies.destinations(), journey.ids[copies.rows]
        device = copies.rows.device
        if isinstance(journey, NormalJourney):
            order = torch.arange(journey.received, device=device)
            self._kind, self._weights = "combine", None
        else:
            assert copies.choices is not None
            chosen = chosen.gather(1, copies.choices[:, None])
            # The experts' input lies by slot; rows go back in the order they came in.
            order = journey.handle.slots.argsort().argsort()
            self._kind, self._weights = "low_latency_combine", journey.weights
        shards = ExpertShards(blocks.per_rank * ranks, ranks)
        theirs = blocks.part_of(shards.local(chosen, destinations[:, None]))
        mine = blocks.part_of(arrived.ids)[order]
        received = torch.tensor(journey.handle.received, device=device)
        sources = torch.arange(ranks, device=device).repeat_interleave(received)
        parts = range(blocks.parts)
        self._copies, self._tokens = copies, journey.sent
        self._places = [(theirs == part).nonzero().flatten() for part in parts]
        self._rows = [order[mine == part] for part in parts]
        self._sent = [_per_rank(sources[mine == part], ranks) for part in parts]
        self._back = [_per_rank(destinations[places], ranks) for places in self._places]

    def rows(self, part: int) -> Tensor:
        """[n] int64, which of the experts' rows a part takes, in the order it sends them."""
        return self._rows[part]

    def begin(self, part: int, outputs: Tensor) -> Callable[[], Tensor]:
        """outputs [n, H] of `rows(part)` start to travel; the call returned gives those for us."""
        return self._buffer.begin_rows(self._kind, outputs, self._sent[part], self._back[part])

    def total(self, returned: Sequence[Tensor]) -> Tensor:
        """What came back in each part -> [rows, H] in its dtype, added up over ranks."""
        first = returned[0]
        back = first.new_empty(len(self._copies.rows), first.shape[1])
        for places, rows in zip(self._places, returned, strict=True):
            back[places] = rows
        return sum_copies(back, self._copies, self._tokens, self._weights).to(first.dtype)


def _per_rank(ranks_of_rows: Tensor, ranks: int) -> list[int]:
    counts: list[int] = torch.bincount(ranks_of_rows, minlength=ranks).tolist()
    return counts
