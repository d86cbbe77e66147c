"""SGLang's benchmark tools against real servers: every figure of a point is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.bench_cli.grid import Dataset, Point, Setting
from sglang_ext.bench_cli.tools import Load, measure
from tests.e2e.stand import Stand

pytestmark = pytest.mark.e2e

SETTING = Setting("DSPARK", "draft", 4)


def _server(stand: Stand) -> str:
    return stand.speculative("DSPARK", "vanilla", "--decode-log-interval", 4, gamma=4).url


def test_serving_on_a_file_with_fewer_requests_than_asked(stand: Stand, tmp_path: Path) -> None:
    talk = {"conversations": [{"content": "Count to ten."}, {"content": "one two"}]}
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 3)
    point = Point(SETTING, Dataset("talks", str(tmp_path / "talks.jsonl")), 2)
    found = measure(_server(stand), point, Load(output_tokens=16, prompts=8))
    assert found["completed"] == 3
    for figure in ("output_tokens_per_second", "median_tpot_ms", "median_ttft_ms"):
        assert found[figure] > 0, figure
    assert found["acceptance_length"] >= 1


def test_one_batch(stand: Stand) -> None:
    load = Load("one-batch", input_tokens=16, output_tokens=16)
    found = measure(_server(stand), Point(SETTING, Dataset("random"), 2), load)
    assert found["acceptance_length"] >= 1
    rate = found["output_tokens_per_second"]
    assert found["median_tpot_ms"] == pytest.approx(2e3 / rate)
