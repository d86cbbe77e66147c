"""The committed tokens follow the target's own law, whatever the draft and the scheduler do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from sglang_ext.core.spec import accept
from sglang_ext.core.spec.accept import (
    Coins,
    accept_by_rejection,
    accept_by_sample,
    accept_mixed,
)
from sglang_ext.core.spec.sampling import SamplingRows, draw, target_probs
from sglang_ext.core.spec.types import Proposal, VerifyPlan, VerifyResult

DRAWS, GAMMA = 50_000, 2
# Every statistical test has fixed seeds; a sound implementation is far from this level.
LEVEL = 1e-4


@dataclass(frozen=True)
class Chain:
    """A target and a draft that look one token back. [V+1, V] laws, row V for the anchor."""

    target: Tensor
    draft: Tensor

    @classmethod
    def build(cls, vocab: int, params: tuple[float, int, float, float], seed: int = 0) -> Chain:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab + 1, vocab, generator=generator) * 1.5
        noise = torch.randn(vocab + 1, vocab, generator=generator)
        rows = SamplingRows.of(*([x] * (vocab + 1) for x in params))
        return cls(target_probs(logits, rows), torch.softmax((logits + noise) / params[0], -1))

    def restricted(self, ids: Tensor) -> Tensor:
        """[V+1, C] the draft's law over a reduced vocabulary."""
        part = self.draft[:, ids]
        return part / part.sum(-1, keepdim=True)

    def joint(self) -> Tensor:
        """[V, V] exact law of the first two tokens."""
        return self.target[-1][:, None] * self.target[:-1]


def propose(chain: Chain, kind: str, generator: torch.Generator) -> Proposal:
    """DRAWS independent blocks of GAMMA drafts."""
    vocab = chain.target.shape[1]
    ids = torch.arange(0, vocab, 2) if kind == "reduced" else torch.arange(vocab)
    table = chain.restricted(ids)
    previous = torch.full((DRAWS,), vocab)
    tokens, columns, laws = [], [], []
    for _ in range(GAMMA):
        law = table[previous]
        if kind == "one-hot":
            column = law.argmax(-1)
        else:
            column = draw(law, torch.rand(DRAWS, dtype=torch.float64, generator=generator))
        previous = ids[column]
        tokens.append(previous)
        columns.append(column)
        laws.append(law)
    block = Proposal(torch.stack(tokens, 1))
    if kind == "one-hot":
        return block
    block = replace(block, probs=torch.stack(laws, 1))
    if kind == "reduced":
        return replace(block, columns=torch.stack(columns, 1), support=ids)
    return block


def admitted(tokens: Tensor, cut: str, generator: torch.Generator) -> list[int]:
    """Legal lengths: draft k may be cut by anything but itself and what follows it."""
    if cut == "random":
        return torch.randint(0, GAMMA + 1, (len(tokens),), generator=generator).tolist()
    if cut == "by-predecessor":
        return (1 + (tokens[:, 0] % 2)).tolist()
    if cut == "by-itself":  # not legal: what the scheduler must never do
        return torch.where(tokens[:, 0] % 3 == 0, 0, GAMMA).tolist()
    return [GAMMA] * len(tokens)


def first_two_tokens(
    chain: Chain, kind: str, cut: str = "full", seed: int = 7
) -> tuple[Tensor, Tensor]:
    """[DRAWS] first and second committed token; a short round goes on with plain decoding."""
    generator = torch.Generator().manual_seed(seed)
    proposal = propose(chain, kind, generator)
    plan = VerifyPlan.of(admitted(proposal.tokens, cut, generator))
    vocab = chain.target.shape[1]
    window = torch.cat((torch.full((DRAWS, 1), vocab), proposal.tokens), dim=1)
    rows = chain.target[window[plan.row_request, plan.row_offset]]
    result = accept_by_rejection(plan, proposal, rows, Coins.toss(DRAWS, GAMMA, generator))
    first, second = result.tokens[:, 0], result.tokens[:, 1]
    plain = draw(chain.target[first], torch.rand(DRAWS, dtype=torch.float64, generator=generator))
    return first, torch.where(second < 0, plain, second)


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against probabilities; 0 if an impossible cell was seen."""
    observed, expected = observed.flatten().double(), expected.flatten().double() * observed.sum()
    if (observed[expected == 0] > 0).any():
        return 0.0
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    rare = int((expected < 5).sum())
    if rare:
        observed = torch.cat((observed[:rare].sum()[None], observed[rare:]))
        expected = torch.cat((expected[:rare].sum()[None], expected[rare:]))
    keep = expected > 1e-9
    observed, expected = observed[keep], expected[keep]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1)) if len(expected) > 1 else 1.0


def worst(chain: Chain, first: Tensor, second: Tensor) -> float:
    """The smaller p-value of the first token's marginal and the joint of both."""
    vocab = chain.target.shape[1]
    joint = torch.bincount(first * vocab + second, minlength=vocab**2).view(vocab, vocab)
    return min(p_value(joint.sum(1), chain.target[-1]), p_value(joint, chain.joint()))


FILTERS = [
    (1.0, -1, 1.0, 0.0),
    (0.6, -1, 1.0, 0.0),
    (1.6, -1, 1.0, 0.0),
    (1.0, 4, 1.0, 0.0),
    (1.0, -1, 0.7, 0.0),
    (1.0, -1, 1.0, 0.15),
    (1.3, 9, 0.85, 0.05),
]


@pytest.mark.parametrize("kind", ["real", "one-hot", "reduced"])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_every_filter_keeps_the_target_law(
    params: tuple[float, int, float, float], kind: str
) -> None:
    chain = Chain.build(16, params)
    assert worst(chain, *first_two_tokens(chain, kind)) > LEVEL


@pytest.mark.parametrize("vocab", [17, 64])
@pytest.mark.parametrize("kind", ["real", "one-hot", "reduced"])
@pytest.mark.parametrize("cut", ["random", "by-predecessor"])
def test_a_chain_cut_by_the_scheduler_keeps_the_target_law(vocab: int, kind: str, cut: str) -> None:
    chain = Chain.build(vocab, (0.9, -1, 0.95, 0.0), seed=vocab)
    assert worst(chain, *first_two_tokens(chain, kind, cut)) > LEVEL


def test_the_test_sees_a_draft_that_decides_on_its_own_admission() -> None:
    chain = Chain.build(16, FILTERS[0])
    assert worst(chain, *first_two_tokens(chain, "real", "by-itself")) < LEVEL


def residual_is_plain(law: Tensor, *_: object) -> Tensor:
    return law


def residual_always(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mutant(law: Tensor, proposal: Proposal, accepted: Tensor, rejected: Tensor) -> Tensor:
        return true(law, proposal, accepted, torch.ones_like(rejected))

    return mutant


def residual_of_the_next_draft(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mutant(law: Tensor, proposal: Proposal, accepted: Tensor, rejected: Tensor) -> Tensor:
        return true(law, proposal, accepted + 1, rejected)

    return mutant


@pytest.mark.parametrize(
    ("name", "cut"),
    [("plain", "full"), ("always", "random"), ("next", "full")],
)
@pytest.mark.parametrize("kind", ["real", "reduced"])
def test_the_test_sees_a_wrong_residual(
    monkeypatch: pytest.MonkeyPatch, name: str, cut: str, kind: str
) -> None:
    mutants = {
        "plain": residual_is_plain,
        "always": residual_always(accept._residual),
        "next": residual_of_the_next_draft(accept._residual),
    }
    monkeypatch.setattr(accept, "_residual", mutants[name])
    chain = Chain.build(16, FILTERS[0])
    assert worst(chain, *first_two_tokens(chain, kind, cut)) < LEVEL


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_test_sees_a_bonus_from_a_neighbouring_row(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    true = accept._residual

    def mutant(law: Tensor, proposal: Proposal, accepted: Tensor, rejected: Tensor) -> Tensor:
        wrong = law.roll(shift, dims=0)
        return true(torch.where(rejected[:, None], law, wrong), proposal, accepted, rejected)

    monkeypatch.setattr(accept, "_residual", mutant)
    chain = Chain.build(16, FILTERS[0])
    assert worst(chain, *first_two_tokens(chain, "real", "random")) < LEVEL


def one(
    draft: int, p: list[list[float]], q: list[float] | None, u: float, final: float
) -> VerifyResult:
    probs = None if q is None else torch.tensor([[q]])
    return accept_by_rejection(
        VerifyPlan.of([1]),
        Proposal(torch.tensor([[draft]]), probs),
        torch.tensor(p),
        Coins(torch.tensor([[u]], dtype=torch.float64), torch.tensor([final], dtype=torch.float64)),
    )


@pytest.mark.parametrize("q", [None, [0.5, 0.5, 0.0]])
def test_a_coin_of_zero_never_accepts_a_token_without_mass(q: list[float] | None) -> None:
    result = one(1, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], q, u=0.0, final=0.0)
    assert result.accepted.tolist() == [0]
    assert result.tokens.tolist() == [[2, -1]]


@pytest.mark.parametrize("final", [0.0, 0.5, 1 - 2**-53])
def test_the_final_coin_never_picks_a_token_without_mass(final: float) -> None:
    accepted = one(1, [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], None, u=1 - 2**-53, final=final)
    assert accepted.tokens.tolist() == [[1, 1]]
    rejected = one(1, [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [0.0, 1.0, 0.0], u=0.75, final=final)
    assert rejected.tokens.tolist() == [[0, -1]]


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    # q exceeds p everywhere by a rounding error, and the coin lands in the gap.
    q = torch.tensor([0.5, 0.5]).nextafter(torch.tensor(1.0))
    result = one(0, [[0.5, 0.5], [1.0, 0.0]], q.tolist(), u=1 - 2**-53, final=0.9)
    assert result.accepted.tolist() == [0]
    assert result.tokens.tolist() == [[1, -1]]


def test_identical_laws_accept_everything() -> None:
    law = [0.1, 0.2, 0.7]
    assert one(0, [law, law], law, u=1 - 2**-53, final=0.0).accepted.tolist() == [1]


def test_a_draft_wider_than_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"proposal.probs.*at most 3 columns.*found 4"):
        one(1, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [0.25] * 4, u=0.0, final=0.0)


def chain_oracle(lengths: list[int], drafts: Tensor, samples: Tensor) -> list[list[int]]:
    rows, first = [], 0
    for r, n in enumerate(lengths):
        kept = 0
        while kept < n and drafts[r, kept] == samples[first + kept]:
            kept += 1
        tokens = [*drafts[r, :kept].tolist(), int(samples[first + kept])]
        rows.append(tokens + [-1] * (drafts.shape[1] + 1 - len(tokens)))
        first += n + 1
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_an_equality_chain_keeps_drafts_up_to_the_first_difference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests, gamma = 1 + seed % 5, 1 + seed % 7
    drafts = torch.randint(0, 2, (requests, gamma), generator=generator)
    lengths = torch.randint(0, gamma + 1, (requests,), generator=generator).tolist()
    if seed % 3 == 0:
        lengths = [gamma] * requests
    plan = VerifyPlan.of(lengths)
    samples = torch.randint(0, 2, (plan.total,), generator=generator)
    result = accept_by_sample(plan, drafts, samples)
    expected = chain_oracle(lengths, drafts, samples)
    assert result.tokens.tolist() == expected
    assert result.commit_lengths.tolist() == [sum(t >= 0 for t in row) for row in expected]


def test_a_mixed_batch_gives_each_request_its_own_law() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths, vocab, gamma = [3, 0, 2, 3, 1], 11, 3
    plan = VerifyPlan.of(lengths)
    q = torch.softmax(torch.randn(5, gamma, vocab, generator=generator), -1)
    tokens = torch.randint(0, vocab, (5, gamma), generator=generator)
    samples = torch.randint(0, vocab, (plan.total,), generator=generator)
    probs = torch.softmax(torch.randn(plan.total, vocab, generator=generator), -1)
    coins = Coins.toss(5, gamma, generator)
    by_rejection = torch.tensor([True, True, False, True, False])
    sampled = accept_by_rejection(plan, Proposal(tokens, q), probs, coins)
    # What nobody reads may be anything.
    q[[2, 4]] = float("nan")
    probs[by_rejection.logical_not()[plan.row_request]] = float("nan")
    mixed = accept_mixed(
        plan,
        Proposal(tokens, q),
        by_rejection=by_rejection,
        samples=samples,
        probs=probs,
        coins=coins,
    )
    chain = accept_by_sample(plan, tokens, samples)
    for r, rejection in enumerate(by_rejection.tolist()):
        alone = sampled if rejection else chain
        assert mixed.tokens[r].tolist() == alone.tokens[r].tolist()
        assert mixed.accepted[r] == alone.accepted[r]


def test_candidate_lists_that_differ_by_slot_are_laid_out_by_their_ids() -> None:
    # q lives on two candidates per slot; the residual must take it from the right ids.
    proposal = Proposal(
        tokens=torch.tensor([[4]]),
        probs=torch.tensor([[[0.9, 0.1]]]),
        columns=torch.tensor([[0]]),
        support=torch.tensor([[[4, 2]]]),
    )
    p = torch.tensor([[0.0, 0.3, 0.1, 0.0, 0.6], [1.0, 0.0, 0.0, 0.0, 0.0]])
    coins = Coins(torch.tensor([[0.7]]), torch.tensor([0.99]))
    result = accept_by_rejection(VerifyPlan.of([1]), proposal, p, coins)
    assert result.tokens.tolist() == [[1, -1]]
