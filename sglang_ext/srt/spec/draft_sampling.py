"""How a drafter draws for each request of a batch: argmax, fresh coins, or the request's seed."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.spec.markov import DraftSampling
from sglang_ext.core.spec.sampling import seeded_sample
from sglang_ext.srt.spec.acceptance import REJECTION, SEEDED, SamplingLaws
from sglang_ext.srt.spec.live import LiveBatch


def draft_sampling(
    live: LiveBatch,
    laws: SamplingLaws,
    gamma: int,
    columns: Tensor | None,
    generator: torch.Generator,
) -> DraftSampling | None:
    """None for an all-greedy batch.

    columns: target id of each draft column, [Vd] int64 or, where every step has candidates of its
    own, [R, G, C]; None when a column is the id itself.
    A seeded request drafts with the noise its target sample will use, so that the two agree
    whenever draft and target agree on the law (a Gumbel coupling).
    """
    if laws.all_greedy:
        return None
    device = live.prefix.device
    fixed = torch.tensor([kind != REJECTION for kind in laws.kinds], device=device)
    inverse = torch.tensor([[1.0 / t] for t in laws.rows.temperature], device=device)
    coins = torch.rand(len(live), gamma, dtype=torch.float64, generator=generator)
    return DraftSampling(
        inverse_temperature=inverse,
        coins=coins.to(device),
        fixed=fixed if bool(fixed.any()) else None,
        sampler=_seeded_sampler(live, laws, columns),
        filters=laws.rows if laws.rows.ranked or laws.rows.floored else None,
    )


def _seeded_sampler(
    live: LiveBatch, laws: SamplingLaws, columns: Tensor | None
) -> _SeededSampler | None:
    chosen = laws.which(SEEDED)
    return _SeededSampler(live.prefix[chosen].cpu(), laws, chosen, columns) if chosen else None


class _SeededSampler:
    """Step sampler: the seeded draw for seeded requests, the argmax for the rest."""

    def __init__(
        self, starts: Tensor, laws: SamplingLaws, chosen: list[int], columns: Tensor | None
    ) -> None:
        self.starts, self.chosen, self.columns = starts, chosen, columns
        self.rows = laws.rows.take(chosen)
        self.seeds = torch.tensor([laws.seeds[r] for r in chosen], dtype=torch.int64)

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """[R, Vd] logits of the draft at `step` -> [R] columns."""
        picked = logits.argmax(dim=-1)
        for i, r in enumerate(self.chosen):
            # One at a time: candidates differ from request to request.
            one = slice(i, i + 1)
            columns = self.columns
            if columns is not None and columns.dim() == 3:
                columns = columns[r, step]
            picked[r : r + 1] = seeded_sample(
                logits[r : r + 1],
                self.rows.take([i]),
                self.seeds[one],
                self.starts[one] + step,
                columns,
            )
        return picked
