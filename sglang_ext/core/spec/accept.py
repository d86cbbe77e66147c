"""Which drafts a verification keeps, and the token of the target that follows them.

The result has the target's own law p for any draft law q (Leviathan et al., arXiv:2211.17192;
DSpark, arXiv:2607.05147, section 3). Coins are arguments, so a round is a function of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ext.core.spec.sampling import draw
from sglang_ext.core.spec.types import Proposal, VerifyPlan, VerifyResult

# Below this mass p and q agree up to rounding, and their difference is noise.
_MIN_RESIDUAL_MASS = 1e-8


@dataclass(frozen=True, eq=False)
class Coins:
    """Uniform numbers in [0, 1) that a round spends, drawn after the proposal.

    accept: [R, G], one per draft
    final:  [R], for the token that ends the run
    """

    accept: Tensor
    final: Tensor

    @classmethod
    def toss(cls, requests: int, gamma: int, generator: torch.Generator) -> Coins:
        """Draws a round's coins at fp64, so that a coin below 1 stays below 1 when scaled."""
        coins = torch.rand(
            requests, gamma + 1, dtype=torch.float64, generator=generator, device=generator.device
        )
        return cls(accept=coins[:, :gamma], final=coins[:, gamma])


# Law of an equality chain (greedy requests, seeded requests, any deterministic target token):
#   accept draft x_j while it equals the target's own token at row j-1
#   commit the target's tokens up to and including the first that differs
def accept_by_sample(plan: VerifyPlan, drafts: Tensor, samples: Tensor) -> VerifyResult:
    """Keeps drafts while they equal what the target itself chose.

    drafts:  [R, G] int64
    samples: [total] int64, the target's token at every verify row: the argmax of a greedy
             request, the seeded sample of a seeded one
    """
    gamma = drafts.shape[1]
    chosen = plan.padded(samples, gamma + 1)
    steps = torch.arange(gamma + 1, device=drafts.device)
    kept = drafts == chosen[:, :gamma]
    if plan.max_length < gamma or not plan.uniform:
        kept &= steps[:gamma] < plan.lengths[:, None]
    accepted = kept.cumprod(dim=1).sum(dim=1)
    return VerifyResult(accepted, chosen.masked_fill(steps > accepted[:, None], -1))


# Law of rejection sampling:
#   accept x_j with probability min(1, p_j(x_j) / q_j(x_j)), left to right
#   first rejection: the next token is drawn from max(p - q, 0), normalised; end
#   no rejection (all accepted, or cut by the scheduler): the next token is drawn from plain p
def accept_by_rejection(
    plan: VerifyPlan, proposal: Proposal, probs: Tensor, coins: Coins
) -> VerifyResult:
    """Keeps drafts so that the committed tokens follow the target's law.

    probs: [total, V] fp32, the target's law p at every verify row: filtered, rows sum to 1
    """
    drafts, gamma = proposal.tokens, proposal.gamma
    _check_support(proposal, probs)
    first = plan.cu_rows[:-1]
    steps = torch.arange(gamma, device=drafts.device)
    live = steps < plan.lengths[:, None]
    rows = torch.where(live, first[:, None] + steps, first[:, None])

    # u < p/q as u*q < p: needs no clamp at q = 0, and at u = 0 it still refuses p = 0.
    bar = coins.accept if proposal.probs is None else coins.accept * _chosen_probs(proposal)
    accepted = ((bar < probs[rows, drafts]) & live).cumprod(dim=1).sum(dim=1)

    rejected = accepted < plan.lengths
    law = _residual(probs[first + accepted], proposal, accepted, rejected)
    return _assemble(drafts, accepted, draw(law, coins.final))


def accept_mixed(
    plan: VerifyPlan,
    proposal: Proposal,
    *,
    by_rejection: Tensor,
    samples: Tensor,
    probs: Tensor,
    coins: Coins,
) -> VerifyResult:
    """A batch whose requests follow different laws; each gets exactly its own.

    by_rejection: [R] bool, True for rejection sampling, False for an equality chain
    samples:      [total] int64, read at the rows of equality chains only
    probs:        [total, V] fp32, read at the rows of rejection requests only
    """
    chain = accept_by_sample(plan, proposal.tokens, samples)
    sampled = accept_by_rejection(plan, proposal, probs, coins)
    return VerifyResult(
        torch.where(by_rejection, sampled.accepted, chain.accepted),
        torch.where(by_rejection[:, None], sampled.tokens, chain.tokens),
    )


def _check_support(proposal: Proposal, probs: Tensor) -> None:
    q = proposal.probs
    if q is not None and proposal.support is None and q.shape[-1] > probs.shape[-1]:
        raise ValueError(
            f"proposal.probs: expected at most {probs.shape[-1]} columns (the target's "
            f"vocabulary), found {q.shape[-1]}; cut the padding of the draft's logits or pass "
            "`support`"
        )


def _chosen_probs(proposal: Proposal) -> Tensor:
    """[R, G] q of each drafted token."""
    assert proposal.probs is not None
    columns = proposal.tokens if proposal.columns is None else proposal.columns
    return proposal.probs.gather(2, columns[:, :, None]).squeeze(2)


def _residual(law: Tensor, proposal: Proposal, accepted: Tensor, rejected: Tensor) -> Tensor:
    """Turns p into max(p - q, 0) for the rejected requests.

    law: [R, V], p at the row after the accepted drafts
    """
    at = accepted.clamp(max=proposal.gamma - 1)
    if proposal.probs is None:
        rest = law.scatter(1, proposal.tokens.gather(1, at[:, None]), 0.0)
    else:
        rest = _minus_draft(law, proposal, at).clamp_(min=0.0)
    usable = rejected & (rest.sum(dim=1) > _MIN_RESIDUAL_MASS)
    return torch.where(usable[:, None], rest, law)


def _minus_draft(law: Tensor, proposal: Proposal, at: Tensor) -> Tensor:
    """[R, V] p - q, with q of draft `at` [R] laid out over the target's vocabulary."""
    assert proposal.probs is not None
    picked = torch.arange(len(at), device=law.device), at
    q = proposal.probs[picked].to(law.dtype)
    if proposal.support is None:
        rest = law.clone()
        rest[:, : q.shape[1]] -= q
        return rest
    ids = proposal.support if proposal.support.dim() == 1 else proposal.support[picked]
    return law.scatter_add(1, ids.expand_as(q), -q)


def _assemble(drafts: Tensor, accepted: Tensor, last: Tensor) -> VerifyResult:
    """[R, G+1] accepted drafts, then `last`, then -1."""
    requests, gamma = drafts.shape
    steps = torch.arange(gamma + 1, device=drafts.device)
    tokens = torch.cat((drafts, drafts.new_zeros(requests, 1)), dim=1)
    tokens = torch.where(steps == accepted[:, None], last[:, None], tokens)
    return VerifyResult(accepted, tokens.masked_fill_(steps > accepted[:, None], -1))
