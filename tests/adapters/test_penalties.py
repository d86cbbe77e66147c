"""Penalties of verify rows against SGLang's own penalizers, fed one token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_ext.core.spec.types import VerifyPlan
from sglang_ext.srt.spec.penalties import PenaltyBook, restore_at_prefill

VOCAB = 11
EOS = 3


def _request(rid: str = "a", **params: Any) -> Any:
    fields = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": {5},
    }
    return SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(**(fields | params)),
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS),
        output_ids=[],
        finished=lambda: False,
    )


class _Batch:
    """As much of a ScheduleBatch as the penalizers look at."""

    device = "cpu"

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


def _penalizers(batch: _Batch) -> Any:
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    return penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, kinds)


def _serve(penalizers: Any, logits: torch.Tensor) -> None:
    """What a served step does: additive penalties, then scaling ones, in that order."""
    additive = torch.zeros_like(logits)
    penalizers.accumulate_additive_penalties(additive)
    logits.add_(additive)
    scaling = penalizers.accumulate_scaling_penalties()
    if scaling is not None:
        logits.copy_(torch.where(logits < 0, logits * scaling, logits / scaling))


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    emitted=tokens,
    drafts=st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3),
    frequency=st.sampled_from([0.0, 0.7]),
    presence=st.sampled_from([0.0, -0.4]),
    repetition=st.sampled_from([1.0, 1.3]),
    least=st.integers(0, 12),
)
def test_every_verify_row_is_penalised_as_the_step_it_stands_for(
    emitted: list[int],
    drafts: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    least: int,
) -> None:
    req = _request(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=least,
    )
    batch = _Batch([req])
    theirs = _penalizers(batch)
    logits = torch.randn(4, VOCAB)
    expected = logits.clone()
    for token in emitted:
        theirs.cumulate_output_tokens(torch.tensor([token]))
    for row, token in enumerate([*drafts, 0]):
        _serve(theirs, expected[row : row + 1])
        theirs.cumulate_output_tokens(torch.tensor([token]))

    book = PenaltyBook()
    book.begin(req, emitted[0])
    book.commit([req], [emitted[1:]])
    book.apply(logits, [req], torch.tensor([drafts]), VerifyPlan.of([3]))
    torch.testing.assert_close(logits, expected)


@settings(deadline=None, max_examples=30)
@given(emitted=tokens, repetition=st.sampled_from([1.0, 1.3]), least=st.integers(0, 12))
def test_a_request_that_is_prefilled_again_keeps_its_penalties(
    emitted: list[int], repetition: float, least: int
) -> None:
    req = _request(frequency_penalty=0.7, repetition_penalty=repetition, min_new_tokens=least)
    neighbour = _request("b", presence_penalty=0.5)
    batch = _Batch([neighbour, req])
    before = _penalizers(batch)
    for token in emitted:
        before.cumulate_output_tokens(torch.tensor([0, token]))
    logits = torch.randn(2, VOCAB)
    expected = logits.clone()
    _serve(before, expected)

    req.output_ids = list(emitted)
    info = SimpleNamespace(
        temperatures=torch.ones(2, 1), vocab_size=VOCAB, penalizer_orchestrator=_penalizers(batch)
    )
    SamplingBatchInfo.update_penalties(info)
    restore_at_prefill(SimpleNamespace(reqs=batch.reqs, sampling_info=info))
    info.penalizer_orchestrator = None
    SamplingBatchInfo._apply_pre_grammar_logits_transforms(info, logits)
    torch.testing.assert_close(logits[1], expected[1])
    assert not torch.isinf(logits[0]).any()


def test_a_request_id_used_again_starts_afresh() -> None:
    book = PenaltyBook()
    book.begin(_request(frequency_penalty=1.5), 2)
    second = _request()
    book.begin(second, 4)
    assert not book.applies_to([second])


def test_requests_that_are_gone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.srt.spec.penalties._PRUNE_AT", 10)
    book = PenaltyBook()
    for n in range(30):
        req = _request(str(n), frequency_penalty=1.0)
        req.finished = lambda n=n: n < 25
        book.begin(req, 1)
    assert len(book._states) <= 11
