"""From the target's logits to what each request commits, every sampling parameter applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.spec.accept import Coins, accept_by_sample, accept_mixed
from sglang_ext.core.spec.argmax import row_argmax
from sglang_ext.core.spec.sampling import TOP_K_ALL, SamplingRows, seeded_sample, target_probs
from sglang_ext.core.spec.types import Proposal, VerifyPlan, VerifyResult

GREEDY, SEEDED, REJECTION = "greedy", "seeded", "rejection"


@dataclass(frozen=True, eq=False)
class SamplingLaws:
    """How each of R requests chooses its tokens.

    kinds: greedy (argmax), seeded (noise keyed by seed and position) or rejection (fresh coins)
    seeds: one per request, read for the seeded ones only
    """

    kinds: list[str]
    seeds: list[int]
    rows: SamplingRows

    @property
    def all_greedy(self) -> bool:
        return all(kind == GREEDY for kind in self.kinds)

    def which(self, kind: str) -> list[int]:
        return [r for r, k in enumerate(self.kinds) if k == kind]

    def take(self, requests: list[int]) -> SamplingLaws:
        if len(requests) == len(self.kinds):
            return self
        return SamplingLaws(
            [self.kinds[r] for r in requests],
            [self.seeds[r] for r in requests],
            self.rows.take(requests),
        )

    @classmethod
    def greedy(cls, requests: int) -> SamplingLaws:
        rows = SamplingRows.of([1.0] * requests, [1] * requests)
        return cls([GREEDY] * requests, [0] * requests, rows)

    @classmethod
    def of(cls, reqs: list[Any], info: Any) -> SamplingLaws:
        """Read from the requests; `info` tells whether the whole server samples by seed."""
        params = [req.sampling_params for req in reqs]
        server_seeds = None if info.sampling_seed is None else info.sampling_seed.tolist()
        kinds, seeds = [], []
        for r, p in enumerate(params):
            seed = p.sampling_seed if server_seeds is None else server_seeds[r]
            seeds.append(0 if seed is None else int(seed))
            kinds.append(GREEDY if p.top_k == 1 else REJECTION if seed is None else SEEDED)
        rows = SamplingRows.of(
            [p.temperature for p in params],
            [p.top_k if 1 <= p.top_k < TOP_K_ALL else TOP_K_ALL for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            info.temperatures.device,
        )
        return cls(kinds, seeds, rows)


def accept(
    logits: Tensor,
    plan: VerifyPlan,
    proposal: Proposal,
    laws: SamplingLaws,
    positions: Tensor,
    generator: torch.Generator,
) -> VerifyResult:
    """logits [total, V] after adjustment; positions [total] int64 of the verify rows."""
    samples = row_argmax(logits)
    if laws.all_greedy:
        return accept_by_sample(plan, proposal.tokens, samples)
    _overwrite_seeded(samples, logits, plan, laws, positions)
    by_rejection = torch.tensor([kind == REJECTION for kind in laws.kinds])
    if not bool(by_rejection.any()):
        return accept_by_sample(plan, proposal.tokens, samples)
    return accept_mixed(
        plan,
        proposal,
        by_rejection=by_rejection.to(logits.device),
        samples=samples,
        probs=_rejection_probs(logits, plan, laws),
        coins=_toss(proposal, generator, logits.device),
    )


def _toss(proposal: Proposal, generator: torch.Generator, device: torch.device) -> Coins:
    """Coins come from one CPU generator, so that every rank and device draws the same."""
    coins = Coins.toss(proposal.requests, proposal.gamma, generator)
    return Coins(coins.accept.to(device), coins.final.to(device))


def _rows_of(plan: VerifyPlan, requests: list[int]) -> list[int]:
    return [i for r in requests for i in range(plan.cu_list[r], plan.cu_list[r + 1])]


def _rejection_probs(logits: Tensor, plan: VerifyPlan, laws: SamplingLaws) -> Tensor:
    """[total, V] fp32: the law of rejection requests; rows of the others hold nothing of use."""
    chosen = laws.which(REJECTION)
    rows = laws.rows.for_rows(plan)
    if len(chosen) == len(laws.kinds):
        return target_probs(logits, rows)
    index = _rows_of(plan, chosen)
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    probs[index] = target_probs(logits[index], rows.take(index))
    return probs


def _overwrite_seeded(
    samples: Tensor, logits: Tensor, plan: VerifyPlan, laws: SamplingLaws, positions: Tensor
) -> None:
    """Put the seeded sample of each row of a seeded request into `samples` [total]."""
    chosen = laws.which(SEEDED)
    if not chosen:
        return
    index = _rows_of(plan, chosen)
    owners = plan.row_request[index].tolist()
    seeds = torch.tensor([laws.seeds[r] for r in owners], dtype=torch.int64)
    samples[index] = seeded_sample(
        logits[index], laws.rows.for_rows(plan).take(index), seeds, positions[index].cpu()
    )
