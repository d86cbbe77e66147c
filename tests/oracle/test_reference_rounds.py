"""Round by round, the server drafts and accepts what a second implementation over HF does."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.e2e.client import greedy
from tests.e2e.stand import Stand
from tests.e2e.workload import identifier_prompt, random_prompt
from tests.oracle.reference_decode import Trace, speculative

pytestmark = [pytest.mark.e2e, pytest.mark.oracle]

GAMMA, TOKENS = 5, 40
PROMPTS = [random_prompt(1, 1), random_prompt(7, 2), random_prompt(31, 3), identifier_prompt(4)]
CASES = (
    ("DSPARK", "vanilla", "llama"),
    ("DSPARK", "gated", "llama"),
    ("DSPARK", "rnn", "llama"),
    ("DSPARK", "reduced-vocabulary", "llama"),
    ("DSPARK", "own-position", "llama"),
    ("DSPARK", "sliding", "llama"),
    ("DSPARK", "vanilla", "qwen2"),
    ("DSPARK", "vanilla", "qwen3_moe"),
    ("DFLASH", "zlab", "llama"),
    ("DFLASH", "anchor", "llama"),
    ("DFLASH", "sliding", "llama"),
    ("DFLASH", "all-sliding", "llama"),
    ("DFLASH", "dflash2", "llama"),
    ("DFLASH", "reduced-vocabulary", "llama"),
    ("DFLASH", "zlab", "qwen3"),
)


def _ends(trace: Trace) -> list[int]:
    """Tokens committed after the prefill and after each round."""
    return list(accumulate((len(r) for r in trace.rounds), initial=1))


@pytest.mark.parametrize(("algorithm", "name", "kind"), CASES)
def test_rounds(stand: Stand, algorithm: str, name: str, kind: str) -> None:
    checkpoints = stand.checkpoints
    target, draft = checkpoints.target(kind), checkpoints.draft(algorithm, name, kind)
    reference = checkpoints.reference(draft, target)
    client = stand.speculative(algorithm, name, kind=kind, gamma=GAMMA)
    for prompt in PROMPTS:
        trace = speculative(checkpoints.model(target), reference, prompt, TOKENS, GAMMA)
        client.flush()
        streamed = list(client.stream(prompt, greedy(TOKENS, ignore_eos=True)))
        reply = streamed[-1]
        assert reply.ids == trace.tokens
        assert _trimmed(reply.accepted) == trace.histogram
        assert reply.meta["spec_verify_ct"] == len(trace.rounds)
        assert reply.acceptance_length == pytest.approx(TOKENS / len(trace.rounds))
        # A slow reader gets several rounds at once, but never part of one.
        assert {len(part.ids) for part in streamed} <= set(_ends(trace))


def _trimmed(histogram: list[int]) -> list[int]:
    while histogram and histogram[-1] == 0:
        histogram = histogram[:-1]
    return histogram
