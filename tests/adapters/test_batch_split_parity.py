"""The halves of a batch equal those SGLang's two-batch overlap makes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.batch_overlap import two_batch_overlap as theirs
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.core.batch_split import split_by_requests, split_by_tokens


@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    threshold=st.sampled_from([0.0, 0.25, 0.48, 0.5]),
)
def test_prefill_halves(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], threshold: float
) -> None:
    monkeypatch.setattr(theirs, "get_tbo_token_distribution_threshold", lambda: threshold)
    mode, total = ForwardMode.EXTEND, sum(lengths)
    cut = theirs.compute_split_seq_index(mode, total, lengths, None)
    tokens = theirs.compute_split_token_index(cut, mode, lengths, None)
    assert split_by_tokens(lengths, threshold).tokens == tokens


@pytest.mark.parametrize("requests", range(8))
@pytest.mark.parametrize(
    ("mode", "rows"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 5)]
)
def test_decode_and_verify_halves(requests: int, mode: ForwardMode, rows: int) -> None:
    cut = theirs.compute_split_seq_index(mode, requests * rows, None, rows)
    tokens = theirs.compute_split_token_index(cut, mode, None, rows)
    got = split_by_requests(requests, rows)
    assert (got.requests, got.tokens) == (cut, tokens)
