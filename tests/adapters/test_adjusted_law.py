"""50,000 rounds keep the law that penalties, bias and minimum length make of the target's.

Every round is the worker's own `adjust` and `accept` over one request each; the law is written out
prefix by prefix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sglang_ext.core.spec.block import verify_ids, verify_positions
from sglang_ext.core.spec.types import Proposal, VerifyPlan
from sglang_ext.srt.spec.acceptance import SamplingLaws, accept
from sglang_ext.srt.spec.logits import adjust, needs_adjustment
from sglang_ext.srt.spec.penalties import PenaltyBook, PenaltyState

VOCAB, GAMMA, DRAWS = 16, 2, 50_000
EOS, STOP, ANCHOR = 3, 5, 7
LEVEL = 1e-5


@dataclass(frozen=True)
class Asked:
    """A request's parameters; bias: token -> what is added to its logit."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    least: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    temperature: float = 1.0
    top_k: int = VOCAB
    top_p: float = 1.0
    min_p: float = 0.0

    def request(self) -> Any:
        params = SimpleNamespace(
            frequency_penalty=self.frequency,
            presence_penalty=self.presence,
            repetition_penalty=self.repetition,
            min_new_tokens=self.least,
            stop_token_ids={STOP},
            sampling_seed=None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )
        return SimpleNamespace(
            sampling_params=params, eos_token_ids={EOS}, tokenizer=None, output_ids=[]
        )

    def biases(self) -> Tensor:
        """[V]"""
        out = torch.zeros(VOCAB)
        for token, value in self.bias.items():
            out[token] = value
        return out

    def law(self, logits: Tensor, emitted: list[int]) -> Tensor:
        """[V] float64: chances of the token after `emitted`."""
        x = logits.double().clone()
        for token, times in Counter(emitted).items():
            x[token] -= times * self.frequency + self.presence
        for token in set(emitted):
            x[token] = x[token] * self.repetition if x[token] < 0 else x[token] / self.repetition
        if len(emitted) < self.least:
            x[[EOS, STOP]] = -torch.inf
        probs = ((x + self.biases().double()) / self.temperature).softmax(-1)
        # Each test on the unfiltered law, as SGLang's own sampler has it.
        ranked, order = probs.sort(descending=True)
        out = ranked.cumsum(0) - ranked > self.top_p
        out |= (ranked < self.min_p * ranked[0]) | (torch.arange(VOCAB) >= self.top_k)
        ranked[out] = 0
        return torch.zeros_like(ranked).scatter(0, order, ranked / ranked.sum())


CASES = {
    "frequency and presence": Asked(frequency=0.9, presence=0.6),
    "repetition": Asked(repetition=1.8),
    # Two tokens are out: the anchor, which the prefill sampled, and one more.
    "minimum length": Asked(least=2),
    "bias": Asked(bias={0: 2.0, 4: -100.0, STOP: 1.0}),
    "all at once": Asked(
        0.4, 0.5, 1.2, 2, {1: 1.5}, temperature=0.8, top_k=9, top_p=0.9, min_p=0.05
    ),
}


def p_value(asked: Asked, generator: torch.Generator) -> float:
    """Chi-square of the two tokens after the anchor."""
    target = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(9))
    reqs, book = [], PenaltyBook()
    for r in range(DRAWS):
        reqs.append(SimpleNamespace(**vars(asked.request()), rid=str(r), finished=lambda: False))
        book.begin(reqs[-1], ANCHOR)
    info = SimpleNamespace(
        logit_bias=asked.biases().expand(DRAWS, -1) if asked.bias else None,
        has_custom_logit_processor=False,
        sampling_seed=None,
        temperatures=torch.ones(1),
    )
    batch = SimpleNamespace(reqs=reqs, sampling_info=info, has_grammar=False)
    # Close to the target without its parameters, as a draft is.
    drafted = (target + torch.randn(VOCAB, VOCAB, generator=generator)).softmax(-1)
    tokens = torch.empty(DRAWS, GAMMA, dtype=torch.int64)
    probs = torch.empty(DRAWS, GAMMA, VOCAB)
    previous = torch.full((DRAWS,), ANCHOR)
    for k in range(GAMMA):
        probs[:, k] = drafted[previous]
        previous = torch.multinomial(probs[:, k], 1, generator=generator).squeeze(1)
        tokens[:, k] = previous
    proposal, plan = Proposal(tokens, probs), VerifyPlan.of([GAMMA] * DRAWS)
    anchors = torch.full((DRAWS,), ANCHOR)
    logits = target[verify_ids(plan, anchors, tokens)]
    assert needs_adjustment(batch, book)
    adjust(logits, batch, book, torch.cat((anchors[:, None], tokens), 1), plan, None)
    positions = verify_positions(plan, torch.zeros(DRAWS, dtype=torch.int64))
    found = accept(logits, plan, proposal, SamplingLaws.of(reqs, info), positions, generator)
    # Where the round ended with one token, the next round's would follow the law by itself.
    first, second = found.tokens[:, 0], found.tokens[:, 1]
    after = torch.stack([asked.law(target[a], [ANCHOR, a]) for a in range(VOCAB)])
    plain = torch.multinomial(after[first], 1, generator=generator).squeeze(1)
    pair = first * VOCAB + torch.where(second < 0, plain, second)
    observed = torch.bincount(pair, minlength=VOCAB**2).double().numpy()
    joint = asked.law(target[ANCHOR], [ANCHOR])[:, None] * after
    expected = joint.flatten().numpy() * DRAWS
    if observed[expected == 0].any():
        return 0.0
    common = expected >= 5
    folded = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
    if folded[1][-1] == 0:
        folded = [x[:-1] for x in folded]
    return float(stats.chisquare(*folded).pvalue)


@pytest.mark.parametrize("name", CASES)
def test_the_law_of_the_parameters_is_kept(name: str) -> None:
    assert p_value(CASES[name], torch.Generator().manual_seed(4)) > LEVEL


@pytest.mark.parametrize("name", ["frequency and presence", "minimum length"])
def test_penalties_blind_to_the_drafts_before_a_row_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = PenaltyState.apply
    monkeypatch.setattr(PenaltyState, "apply", lambda self, row, drafts: apply(self, row, []))
    assert p_value(CASES[name], torch.Generator().manual_seed(4)) < LEVEL
