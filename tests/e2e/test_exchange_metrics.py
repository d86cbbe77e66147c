"""The server counts what its expert exchanges move: real rows only, the same out and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import pytest

from sglang_ext.core.support import layout
from tests.e2e.client import Client, greedy
from tests.e2e.stand import Stand
from tests.e2e.workload import random_prompt

pytestmark = pytest.mark.e2e

SAMPLE = re.compile(r"^sglang_ext_expert_exchange_(rows|bytes)_total\{(.*)\} (\S+)$", re.MULTILINE)


def _moved(client: Client) -> dict[tuple[str, str], int]:
    """(rows or bytes, kind of call) -> total over ranks and destinations."""
    totals: dict[tuple[str, str], int] = {}
    for unit, labels, value in SAMPLE.findall(client.get("/metrics").text):
        call = re.search(r'call="(\w+)"', labels)
        assert call is not None
        key = (unit, call[1])
        totals[key] = totals.get(key, 0) + int(float(value))
    return totals


def _gained(after: Mapping[tuple[str, str], int], before: Mapping[tuple[str, str], int]) -> dict:
    return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}


def test_rows_and_bytes_are_those_of_the_tokens(stand: Stand) -> None:
    """One copy of every token per chosen expert and layer, each way; padding is not moved."""
    target = stand.checkpoints.target("qwen3_moe")
    config = json.loads((target / "config.json").read_text())
    flags = layout("ep2 deepep low_latency").flags
    client = stand.server(stand.plain_spec(target, *flags, "--enable-metrics")).client
    prompt, new = random_prompt(17, 1), 9
    before = _moved(client)
    client.generate(prompt, greedy(new, ignore_eos=True))
    gained = _gained(_moved(client), before)
    # The last token is not put through the model.
    tokens = len(prompt) + new - 1
    rows = tokens * config["num_hidden_layers"] * config["num_experts_per_tok"]
    expected = {}
    for call in ("low_latency_dispatch", "low_latency_combine"):
        expected[("rows", call)] = rows
        expected[("bytes", call)] = rows * config["hidden_size"] * 4
    assert gained == expected
