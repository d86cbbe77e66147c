"""Rows of several tensors travel between ranks as one message of bytes.

Bytes, because gloo has no 8-bit float; one message, because its price is the round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """What one kind of exchange has sent from this rank; real rows only, counts not included.

    calls: exchanges
    rows: copies of a token sent, own rank included
    bytes_to_peers: bytes that left this rank
    bytes_kept: bytes of copies this rank sent to itself
    """

    calls: int = 0
    rows: int = 0
    bytes_to_peers: int = 0
    bytes_kept: int = 0


class RowExchange:
    """Uneven all-to-all of rows over one process group, on any backend that has all_to_all.

    watch: called when rows start to travel, for a call to be made when they are there
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.watch: Callable[[], Callable[[], None]] | None = None
        self.ranks = group.size()
        self.rank = group.rank()

    def counts(self, sent: Tensor) -> Tensor:
        """sent [R, n] int64, row r for rank r -> [R, n], row r from rank r."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        return received

    def rows(
        self,
        columns: Sequence[Tensor],
        sent: list[int],
        received: list[int],
        traffic: Traffic,
    ) -> Callable[[], list[Tensor]]:
        """Starts sending rows; the call returned waits and gives the rows that arrived.

        Args:
            columns: each [sum(sent), width], any dtype, grouped by destination rank.
            sent, received: [R] rows for and from each rank.
            traffic: is added to.

        Returns:
            A function of no argument -> each [sum(received), width], grouped by source rank.
        """
        payload = torch.cat([_as_bytes(c) for c in columns], dim=1)
        arrived = payload.new_empty((sum(received), payload.shape[1]))
        work = dist.all_to_all_single(
            arrived, payload, received, sent, group=self.group, async_op=True
        )
        traffic.calls += 1
        traffic.rows += len(payload)
        traffic.bytes_kept += sent[self.rank] * payload.shape[1]
        traffic.bytes_to_peers += (len(payload) - sent[self.rank]) * payload.shape[1]

        seen = self.watch() if self.watch is not None else None
        if seen is not None and work is not None:
            work.get_future().add_done_callback(lambda _: seen())

        def finish() -> list[Tensor]:
            if work is not None:
                work.wait()
            if seen is not None:
                seen()
            return _split(arrived, columns)

        return finish


def _as_bytes(rows: Tensor) -> Tensor:
    # A tensor of no or one element counts as contiguous whatever its strides; view asks for 1.
    if rows.stride(-1) != 1:
        rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows)
    return rows.contiguous().view(torch.uint8)


def _split(payload: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts, first = [], 0
    for column in like:
        end = first + column.shape[1] * column.element_size()
        # A clone starts its own storage, so it is aligned for the wider dtype.
        part = payload[:, first:end].clone(memory_format=torch.contiguous_format)
        parts.append(part.view(column.dtype))
        first = end
    return parts
