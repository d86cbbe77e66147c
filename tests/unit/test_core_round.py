"""A whole round (serial head, confidence, scheduler, verification) keeps the target's law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sglang_ext.core.spec.accept import Coins, accept_by_rejection
from sglang_ext.core.spec.block import verify_ids
from sglang_ext.core.spec.confidence import ConfidenceHead, survivals
from sglang_ext.core.spec.markov import DraftSampling, MarkovHead, build_markov_head, propose
from sglang_ext.core.spec.sampling import SamplingRows, draw, target_probs
from sglang_ext.core.spec.schedule import LaggedScheduler, schedule_prefixes
from sglang_ext.core.spec.sps import SpsTable
from sglang_ext.core.spec.types import Proposal, VerifyPlan

VOCAB, RANK, WIDTH, GAMMA = 16, 4, 6, 2
DRAWS, BATCH = 50_000, 5
ANCHOR, LEVEL = 3, 1e-4
# Steep enough that batches of five verify anything from no draft to all ten.
TABLE = SpsTable.from_seconds({5: 1.0, 7: 1.2, 15: 2.5})


def head_of(kind: str) -> tuple[MarkovHead, ConfidenceHead]:
    torch.manual_seed(5)
    head = build_markov_head(kind, vocab_size=VOCAB, rank=RANK, hidden_size=WIDTH)
    confidence = ConfidenceHead(WIDTH, RANK)
    with torch.no_grad():
        head.markov_w2.weight.mul_(3)
        confidence.proj.weight.mul_(6)
    return head.requires_grad_(False), confidence.requires_grad_(False)


def drafted(kind: str, temperature: float, generator: torch.Generator) -> tuple[Proposal, Tensor]:
    """DRAWS blocks from one anchor, and the confidences an unlawful head would have given."""
    head, confidence = head_of(kind)
    base = torch.randn(GAMMA, VOCAB, generator=generator)
    hidden = torch.randn(DRAWS, GAMMA, WIDTH, generator=generator)
    coins = torch.rand(DRAWS, GAMMA, dtype=torch.float64, generator=generator)
    proposal = propose(
        head,
        base.expand(DRAWS, -1, -1),
        hidden,
        torch.full((DRAWS,), ANCHOR),
        sampling=DraftSampling(torch.full((DRAWS, 1), 1 / temperature), coins),
        confidence=confidence,
    )
    return proposal, confidence(hidden, head.embed(proposal.tokens))


def lengths_of(mode: str, confidence: Tensor) -> list[int]:
    """Lengths for batches of BATCH requests, one batch after the other."""
    chances = survivals(confidence).double().numpy().reshape(-1, BATCH, GAMMA)
    lagged = LaggedScheduler(TABLE, lag=2)
    keys = list(range(BATCH))
    lengths: list[int] = []
    for batch in chances:
        if mode == "early-stop":
            lengths += schedule_prefixes(batch, TABLE)
        elif mode == "lagged":
            lengths += lagged.plan(keys, batch)
        else:
            lengths += [GAMMA] * BATCH
    return lengths


def p_value(
    mode: str, proposal: Proposal, temperature: float, generator: torch.Generator
) -> tuple[float, list[int]]:
    """Chi-square of the first two committed tokens, and how often each length was verified."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(9))
    target = target_probs(table, SamplingRows.of([temperature] * VOCAB))
    assert proposal.confidence is not None
    lengths = lengths_of(mode, proposal.confidence)
    plan = VerifyPlan.of(lengths)
    rows = target[verify_ids(plan, torch.full((DRAWS,), ANCHOR), proposal.tokens)]
    result = accept_by_rejection(plan, proposal, rows, Coins.toss(DRAWS, GAMMA, generator))
    first, second = result.tokens[:, 0], result.tokens[:, 1]
    plain = draw(target[first], torch.rand(DRAWS, dtype=torch.float64, generator=generator))
    pair = first * VOCAB + torch.where(second < 0, plain, second)
    observed = torch.bincount(pair, minlength=VOCAB**2).double().numpy()
    expected = (target[ANCHOR][:, None] * target).flatten().double().numpy() * DRAWS
    expected *= observed.sum() / expected.sum()
    common = expected >= 5
    folded = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
    if folded[1][-1] == 0:
        folded = [x[:-1] for x in folded]
    return float(stats.chisquare(*folded).pvalue), np.bincount(lengths, minlength=3).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("mode", ["all", "early-stop", "lagged"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_head_and_scheduler_mode_keeps_the_law(
    kind: str, mode: str, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(11)
    proposal, _ = drafted(kind, temperature, generator)
    value, seen = p_value(mode, proposal, temperature, generator)
    assert value > LEVEL
    # The scheduler must have had something to decide.
    assert mode == "all" or sum(n > 500 for n in seen) >= 2


@pytest.mark.parametrize("mode", ["early-stop", "lagged"])
def test_the_test_sees_a_confidence_that_reads_its_own_token(mode: str) -> None:
    generator = torch.Generator().manual_seed(11)
    proposal, peeking = drafted("vanilla", 1.0, generator)
    value, _ = p_value(mode, replace(proposal, confidence=peeking), 1.0, generator)
    assert value < LEVEL
