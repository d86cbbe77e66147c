"""The bench of decode steps: its sections add up, its gate bites, memory is the formula's."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest

from bench import dsa_decode
from bench.dsa_decode import SUBJECTS, Clock, Subject, compare, measure, table
from sglang_ext.srt.attention import dsa, dsv4

SMALL = {
    "DeepSeek-V4": {"head_dim": 32, "index_head_dim": 16, "index_topk": 4, "sliding_window": 8},
    "DeepSeek-V3.2": {"kv_lora_rank": 32, "index_head_dim": 16, "index_topk": 12},
}
CONTEXTS = [60, 300]


def _small(title: str) -> Subject:
    subject = SUBJECTS[title]
    narrow = {"hidden_size": 64, "moe_intermediate_size": 32, "qk_rope_head_dim": 8}
    return dataclasses.replace(subject, fields=subject.fields | narrow | SMALL[title], prompt=140)


def _sections(row: dict[str, float]) -> float:
    return sum(spent for name, spent in row.items() if name not in ("context", "step"))


@pytest.mark.parametrize("title", SUBJECTS)
def test_a_step_is_split_into_its_parts(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads the same number of rows behind 60 and 300 tokens, the dense one all."""
    reads: list[int] = []
    for module in (dsa, dsv4):

        def sparse(
            q: Any, sources: Any, *, real: Any = module.sparse_attention, **more: Any
        ) -> Any:
            reads.append(sum(int((source.index >= 0).sum()) for source in sources))
            return real(q, sources, **more)

        monkeypatch.setattr(module, "sparse_attention", sparse)
    found = compare(_small(title), CONTEXTS, repeats=2, threads=1)
    for kind in ("sparse", "dense"):
        assert [row["context"] for row in found[kind]] == CONTEXTS
    for row in found["sparse"]:
        assert row["indexer"] > 0
        assert row["rest"] > 0
        assert _sections(row) == pytest.approx(row["step"], rel=0.2), "medians of two"
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(CONTEXTS)
    assert all(layer["held"] == layer["formula"] > 0 for layer in found["memory"])
    kinds = [layer["kind"] for layer in found["memory"]]
    if title == "DeepSeek-V4":
        assert kinds == ["window", "CSA", "HCA"]
        assert {"attention, window", "attention, CSA", "attention, HCA"} <= set(found["sparse"][0])
        # Behind the gate, three steps at each context: window, and top-k or 301 // 128 entries.
        assert reads[9:27] == [8, 12, 8] * 3 + [8, 12, 10] * 3
        assert set(reads[-9:]) == {301}
    else:
        assert kinds == ["latent"] * 3
        assert set(reads[-18:]) == {12}


def test_a_step_that_differs_from_a_prefill_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = dsa_decode.Request.decode
    monkeypatch.setattr(
        dsa_decode.Request, "decode", lambda self, token, at: decode(self, token, at - 1)
    )
    with pytest.raises(SystemExit, match="decode step: expected a prefill's logits"):
        measure(_small("DeepSeek-V3.2"), [60], 1, 1, dense=False)


def test_a_section_inside_another_is_counted_once() -> None:
    clock, now = Clock(), iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa_decode.time, "perf_counter", lambda: float(next(now)))
        with clock.section("outer"):
            assert clock.timed(operator.add, lambda *_: "inner")(1, 2) == 3
            assert clock.timed(operator.add, lambda *_: None)(1, 2) == 3
    assert dict(clock.spent) == {"outer": 2.0, "inner": 1.0}
