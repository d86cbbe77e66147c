"""The server without speculation gives HF's greedy tokens."""

from __future__ import annotations

import pytest

from tests.e2e.stand import Stand
from tests.e2e.workload import BATCHES, lengths, ragged
from tests.oracle.reference_decode import plain
from tests.tiny import EOS, KINDS

pytestmark = [pytest.mark.e2e, pytest.mark.oracle]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_equal_transformers(stand: Stand, kind: str) -> None:
    served = stand.plain_answers(kind)
    model = stand.checkpoints.model(stand.checkpoints.target(kind))
    for (count, seed), answers in zip(BATCHES, served, strict=True):
        for prompt, params, ids in zip(
            ragged(count, seed), lengths(count, 33), answers, strict=True
        ):
            assert ids == plain(model, prompt, params["max_new_tokens"], {EOS})


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_varied(stand: Stand, kind: str) -> None:
    """A model that repeats one token would make every comparison here an empty one."""
    answers = [ids for batch in stand.plain_answers(kind) for ids in batch]
    assert len({tuple(ids) for ids in answers}) > 0.8 * len(answers)
    assert sum(len(set(ids)) for ids in answers) / len(answers) > 8
