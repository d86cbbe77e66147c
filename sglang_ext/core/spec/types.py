"""What crosses the steps of one round: propose -> schedule -> verify -> accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Proposal:
    """The draft block of every request, with the law its tokens were drawn from.

    tokens:     [R, G] int64, drafted tokens as target-vocabulary ids
    probs:      [R, G, C] fp32, q over the C columns that a token could be drawn from;
                None when q is one-hot (a deterministic draft)
    confidence: [R, G] fp32, raw logits of the confidence head; None without one
    columns:    [R, G] int64, the column of `probs` that holds each token;
                None when a column is the target id itself
    support:    [C] or [R, G, C] int64, target id of each column (reduced draft vocabulary,
                candidate list); None when a column is the target id itself
    """

    tokens: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    columns: Tensor | None = None
    support: Tensor | None = None

    @property
    def requests(self) -> int:
        return self.tokens.shape[0]

    @property
    def gamma(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True, eq=False)
class VerifyPlan:
    """How many drafts of each request the target verifies, and the ragged rows this makes.

    Request r owns rows cu_rows[r] .. cu_rows[r+1]-1: the anchor row, then its admitted drafts.

    lengths: [R] int64, admitted drafts per request, 0 <= l_r <= gamma
    """

    lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> VerifyPlan:
        """Builds a plan from Python integers without reading a tensor back later."""
        values = [int(n) for n in lengths]
        if any(n < 0 for n in values):
            raise ValueError(
                f"VerifyPlan.lengths: expected draft counts >= 0, found {values}; "
                "pass the number of admitted drafts, without the anchor row"
            )
        plan = cls(torch.tensor(values, dtype=torch.int64, device=device))
        plan.__dict__["counts"] = values
        return plan

    @classmethod
    def full(cls, requests: int, gamma: int, device: torch.device | str = "cpu") -> VerifyPlan:
        """Verifies every draft of every request."""
        return cls.of([gamma] * requests, device)

    @cached_property
    def counts(self) -> list[int]:
        """[R] admitted drafts as Python integers; waits for the device on first use."""
        return [int(n) for n in self.lengths.tolist()]

    @property
    def requests(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def row_counts(self) -> list[int]:
        """[R] rows per request, 1 + l_r."""
        return [n + 1 for n in self.counts]

    @cached_property
    def cu_list(self) -> list[int]:
        """[R+1] first row of each request, then the total."""
        starts = [0]
        for rows in self.row_counts:
            starts.append(starts[-1] + rows)
        return starts

    @property
    def total(self) -> int:
        """Number of rows, sum of 1 + l_r."""
        return self.cu_list[-1]

    @cached_property
    def max_length(self) -> int:
        """Largest l_r, 0 for an empty batch."""
        return max(self.counts, default=0)

    @cached_property
    def uniform(self) -> bool:
        """True when every request has the same number of rows."""
        return len(set(self.counts)) <= 1

    @cached_property
    def cu_rows(self) -> Tensor:
        """[R+1] int64, `cu_list` on the device."""
        return torch.tensor(self.cu_list, dtype=torch.int64, device=self.lengths.device)

    @cached_property
    def row_request(self) -> Tensor:
        """[total] int64, the request that owns each row."""
        owners = [r for r, rows in enumerate(self.row_counts) for _ in range(rows)]
        return torch.tensor(owners, dtype=torch.int64, device=self.lengths.device)

    @cached_property
    def row_offset(self) -> Tensor:
        """[total] int64, place of each row in its request: 0 is the anchor, j verifies draft j."""
        offsets = [j for rows in self.row_counts for j in range(rows)]
        return torch.tensor(offsets, dtype=torch.int64, device=self.lengths.device)

    def padded(self, values: Tensor, width: int) -> Tensor:
        """Lays ragged rows out as a rectangle.

        values: [total, ...], width >= 1 + max_length  ->  [R, width, ...]
        Cells past a request's last row repeat some existing row: mask them with `lengths`.
        """
        if self.uniform and self.total == self.requests * width:
            return values.view(self.requests, width, *values.shape[1:])
        return values[self._cells(width)]

    def _cells(self, width: int) -> Tensor:
        steps = torch.arange(width, device=self.lengths.device)
        return (self.cu_rows[:-1, None] + steps).clamp_(max=self.total - 1)


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """What each request commits this round.

    accepted: [R] int64, accepted drafts, 0 <= accepted_r <= l_r
    tokens:   [R, G+1] int64, the accepted drafts, then one token of the target (the correction
              or the bonus), then -1
    """

    accepted: Tensor
    tokens: Tensor

    @property
    def commit_lengths(self) -> Tensor:
        """[R] int64, committed tokens, accepted + 1."""
        return self.accepted + 1

    @property
    def bonus(self) -> Tensor:
        """[R] int64, the token of the target that ends the run: the anchor of the next round."""
        return self.tokens.gather(1, self.accepted[:, None]).squeeze(1)
