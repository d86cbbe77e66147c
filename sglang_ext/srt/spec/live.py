"""The requests of one decode step, as the drafter and the verifier need them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sglang_ext.srt.spec.request_options import draft_cap


@dataclass(frozen=True, eq=False)
class LiveBatch:
    """R running requests at the start of a round.

    anchors: [R] int64, the last committed token of each; its KV is not computed yet
    prefix:  [R] int64, committed tokens with KV, so the anchor's position
    pool_rows: [R] int64, rows of the request-to-slot table
    caps:    drafts each request can use this round
    """

    reqs: list[Any]
    anchors: Tensor
    prefix: Tensor
    pool_rows: Tensor
    caps: list[int]

    @classmethod
    def of(cls, batch: Any, anchors: Tensor, gamma: int, context_length: int) -> LiveBatch:
        prefix = batch.seq_lens
        caps = [
            draft_cap(req, position, gamma, context_length)
            for req, position in zip(batch.reqs, prefix.tolist(), strict=True)
        ]
        return cls(batch.reqs, anchors, prefix, batch.req_pool_indices, caps)

    @classmethod
    def pretended(cls, pool_rows: Tensor, prefix: Tensor) -> LiveBatch:
        """Requests that nobody sent, for what is measured before the first one comes."""
        return cls([None] * len(prefix), torch.zeros_like(prefix), prefix, pool_rows, [])

    def __len__(self) -> int:
        return len(self.reqs)

    @cached_property
    def prefix_cpu(self) -> Tensor:
        """`prefix` on the host."""
        return self.prefix.cpu()

    def slots(self, table: Tensor, rows: int) -> Tensor:
        """[R, rows] int64: the pool slots of the anchor and the positions after it.

        table: [requests, context], slot of every position.
        """
        steps = torch.arange(rows, device=self.prefix.device)
        return table[self.pool_rows[:, None], self.prefix[:, None] + steps].to(torch.int64)

    @cached_property
    def drafting(self) -> list[int]:
        """Requests that can use a draft at all."""
        return [r for r, cap in enumerate(self.caps) if cap > 0]

    def take(self, rows: list[int]) -> LiveBatch:
        """Some of the requests, in that order."""
        if len(rows) == len(self):
            return self
        index = torch.tensor(rows, dtype=torch.int64, device=self.prefix.device)
        return LiveBatch(
            [self.reqs[r] for r in rows],
            self.anchors[index],
            self.prefix[index],
            self.pool_rows[index],
            [self.caps[r] for r in rows],
        )
