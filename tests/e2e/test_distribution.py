"""Sampled text follows the target's law exactly: chi-square over the joint of three tokens.

The first token comes from the prefill; the second and third are drafted, accepted, or replaced in
one round. The law is computed by HF, prefix by prefix.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e.stand import Stand
from tests.e2e.workload import random_prompt
from tests.oracle.reference_draft import ReferenceDraft

pytestmark = pytest.mark.e2e

DRAWS = int(os.environ.get("SGLANG_EXT_TEST_DRAWS", "3000"))
BATCH = 64
DEPTH = 3
LEAST_EXPECTED = 8.0
# One false alarm in ten thousand runs of the whole file.
ALPHA = 1e-5

Law = Callable[[Tensor, list[int]], Tensor]


def _tempered(temperature: float) -> Law:
    return lambda logits, _: (logits / temperature).softmax(-1)


def _top_k(k: int) -> Law:
    def law(logits: Tensor, _: list[int]) -> Tensor:
        probs = logits.softmax(-1)
        probs[probs < probs.topk(k).values[-1]] = 0
        return probs / probs.sum()

    return law


def _top_p(p: float) -> Law:
    def law(logits: Tensor, _: list[int]) -> Tensor:
        probs, order = logits.softmax(-1).sort(descending=True)
        probs[probs.cumsum(0) - probs > p] = 0
        return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())

    return law


def _min_p(share: float) -> Law:
    def law(logits: Tensor, _: list[int]) -> Tensor:
        probs = logits.softmax(-1)
        probs[probs < share * probs.max()] = 0
        return probs / probs.sum()

    return law


def _frequency(penalty: float) -> Law:
    def law(logits: Tensor, emitted: list[int]) -> Tensor:
        for token, times in Counter(emitted).items():
            logits[token] -= penalty * times
        return logits.softmax(-1)

    return law


LAWS: dict[str, tuple[dict[str, Any], Law]] = {
    "temperature 1": ({"temperature": 1.0}, _tempered(1.0)),
    "temperature 0.6": ({"temperature": 0.6}, _tempered(0.6)),
    "top-k": ({"temperature": 1.0, "top_k": 3}, _top_k(3)),
    "top-p": ({"temperature": 1.0, "top_p": 0.7}, _top_p(0.7)),
    "min-p": ({"temperature": 1.0, "min_p": 0.3}, _min_p(0.3)),
    "penalty": ({"temperature": 1.0, "frequency_penalty": 1.5}, _frequency(1.5)),
}
CASES = (
    *(("DSPARK", "vanilla", "off", law) for law in LAWS),
    ("DSPARK", "rnn", "sync", "temperature 1"),
    ("DSPARK", "rnn", "sync", "top-k"),
    ("DSPARK", "gated", "async", "temperature 1"),
    ("DSPARK", "reduced-vocabulary", "sync", "temperature 1"),
    ("DFLASH", "zlab", "off", "temperature 1"),
    ("DFLASH", "zlab", "off", "top-p"),
    ("DFLASH", "dflash2", "off", "temperature 1"),
    ("DFLASH", "dflash2", "off", "top-k"),
)


@torch.no_grad()
def _prompt(model: Any, draft: ReferenceDraft) -> list[int]:
    """A prompt after which the draft is right about half the time at its first token."""

    def share(prompt: list[int]) -> float:
        out = model(torch.tensor([prompt]), output_hidden_states=True)
        features = torch.cat([out.hidden_states[i + 1][0] for i in draft.layer_ids], dim=-1)
        first = out.logits[0, -1].softmax(-1).topk(4)
        following = model(torch.tensor([[*prompt, t] for t in first.indices.tolist()]))
        second = following.logits[:, -1].softmax(-1)
        return sum(
            float(mass) * float(row[draft.draft(features, int(token), 1)[0]])
            for mass, token, row in zip(first.values, first.indices, second, strict=True)
        )

    prompts = [random_prompt(9, seed) for seed in range(40)]
    return min(prompts, key=lambda prompt: abs(share(prompt) - 0.45))


@torch.no_grad()
def _expected(model: Any, law: Law, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every answer of DEPTH tokens that is likely enough to be a cell."""
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        rows = torch.tensor([[*prompt, *prefix] for prefix in level])
        logits = model(rows).logits[:, -1].double()
        following: dict[tuple[int, ...], float] = {}
        for (prefix, mass), row in zip(level.items(), logits, strict=True):
            probs = law(row, list(prefix))
            for token in torch.nonzero(probs * mass * DRAWS > LEAST_EXPECTED).flatten().tolist():
                following[(*prefix, token)] = mass * float(probs[token])
        level = following
    return level


def _p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square with everything that is no cell of its own put together."""
    from scipy.stats import chisquare

    observed = [counts[cell] for cell in expected]
    probs = list(expected.values())
    rest = 1.0 - sum(probs)
    if rest * DRAWS > LEAST_EXPECTED:
        observed.append(DRAWS - sum(observed))
        probs.append(rest)
    else:
        probs = [p / sum(probs) for p in probs]
        assert DRAWS - sum(observed) <= 4 * LEAST_EXPECTED
    total = sum(observed)
    return float(chisquare(observed, [p * total for p in probs]).pvalue)


@pytest.mark.parametrize(("algorithm", "name", "mode", "law"), CASES)
def test_joint_law(stand: Stand, algorithm: str, name: str, mode: str, law: str) -> None:
    params, exact = LAWS[law]
    target = stand.checkpoints.target("llama")
    model = stand.checkpoints.model(target)
    draft = stand.checkpoints.draft(algorithm, name)
    prompt = _prompt(model, stand.checkpoints.reference(draft, target))
    expected = _expected(model, exact, prompt)
    assert len(expected) > 2
    client = stand.speculative(
        algorithm,
        name,
        "--max-running-requests",
        BATCH,
        gamma=4,
        env={"SGLANG_EXT_SCHEDULER": mode},
    )
    # One token more than is counted: a round never drafts the last token of a request.
    sampling = {**params, "max_new_tokens": DEPTH + 1, "ignore_eos": True}
    replies = client.batch([prompt] * DRAWS, sampling)
    counts = Counter(tuple(reply.ids[:DEPTH]) for reply in replies)
    drafted = sum(len(reply.accepted) > 1 and sum(reply.accepted[1:]) for reply in replies)
    assert drafted > DRAWS // 20
    assert _p_value(counts, expected) > ALPHA
