"""Random routings that every rank can make for all ranks, so each knows the closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN = 256


@dataclass(frozen=True)
class Routing:
    """What each rank holds: x[r] [T_r, H], ids[r] [T_r, K] int64 with -1, weights[r] [T_r, K]."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    per_rank: int

    @property
    def ranks(self) -> int:
        return len(self.x)

    @property
    def experts(self) -> int:
        return self.ranks * self.per_rank

    def arriving(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Normal mode: rows, local ids and weights that reach `rank`, by source then token."""
        rows, ids, weights = [], [], []
        for x, all_ids, all_weights in zip(self.x, self.ids, self.weights, strict=True):
            for token in range(len(x)):
                local = [
                    i % self.per_rank if i >= 0 and i // self.per_rank == rank else -1
                    for i in all_ids[token].tolist()
                ]
                if max(local) >= 0:
                    keep = torch.tensor(local) >= 0
                    rows.append(x[token])
                    ids.append(torch.tensor(local))
                    weights.append(all_weights[token] * keep)
        if not rows:
            choices = self.ids[0].shape[1]
            return (
                self.x[0].new_empty(0, HIDDEN),
                torch.empty(0, choices, dtype=torch.int64),
                torch.empty(0, choices),
            )
        return torch.stack(rows), torch.stack(ids), torch.stack(weights)

    def copies(self, source: int, low_latency: bool) -> list[int]:
        """Copies that `source` sends to each rank."""
        sent = [0] * self.ranks
        for row in self.ids[source].tolist():
            owners = [i // self.per_rank for i in row if i >= 0]
            for rank in owners if low_latency else set(owners):
                sent[rank] += 1
        return sent


def routing(seed: int, ranks: int, dtype: torch.dtype = torch.float32) -> Routing:
    """Uneven ranks, some without tokens, unused choices, and at times experts nobody wants."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    per_rank, choices = number(1, 3), number(1, 4)
    experts = ranks * per_rank
    choices = min(choices, experts)
    favoured = experts if seed % 3 else number(choices, experts)
    x, ids, weights = [], [], []
    for rank in range(ranks):
        tokens = 0 if (seed + rank) % 4 == 0 else number(1, 7)
        x.append(torch.randn(tokens, HIDDEN, generator=generator).to(dtype))
        chosen = torch.rand(tokens, favoured, generator=generator).argsort(dim=1)[:, :choices]
        unused = torch.rand(tokens, choices, generator=generator) < 0.2
        ids.append(chosen.masked_fill(unused, -1))
        weights.append(torch.rand(tokens, choices, generator=generator))
    return Routing(x, ids, weights, per_rank)
