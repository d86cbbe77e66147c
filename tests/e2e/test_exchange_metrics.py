"""The server counts what its expert exchanges move: real rows only, the same out and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

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


def _copies(target: Path, tokens: list[int], low_latency: bool) -> int:
    """Copies of `tokens` that two ranks of experts send, by transformers' own routing."""
    model = Qwen3MoeForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        routing = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    copies = 0
    for logits in routing:
        chosen = logits.topk(model.config.num_experts_per_tok).indices
        owners = chosen // (model.config.num_experts // 2)
        both = int((owners.amin(1) != owners.amax(1)).sum())
        copies += chosen.numel() if low_latency else len(tokens) + both
    return copies


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_rows_and_bytes_are_those_of_the_tokens(stand: Stand, mode: str) -> None:
    """One copy of every token per chosen expert (in normal mode, per rank that holds any of them)
    and layer, each way; padding, of an idle rank too, is not moved."""
    target = stand.checkpoints.target("qwen3_moe")
    config = json.loads((target / "config.json").read_text())
    flags = layout(f"ep2 deepep {mode}").flags
    client = stand.server(stand.plain_spec(target, *flags, "--enable-metrics")).client
    prompt = random_prompt(17, 1)
    before = _moved(client)
    answer = client.generate(prompt, greedy(9, ignore_eos=True)).ids
    gained = _gained(_moved(client), before)
    # The last token is not put through the model.
    rows = _copies(target, [*prompt, *answer[:-1]], mode == "low_latency")
    width = 4 * config["hidden_size"]
    # The experts apply the weights: they travel, and so do the choices.
    choices = 8 * config["num_experts_per_tok"] if mode == "normal" else 0
    prefix = "low_latency_" if mode == "low_latency" else ""
    assert gained == {
        ("rows", f"{prefix}dispatch"): rows,
        ("rows", f"{prefix}combine"): rows,
        ("bytes", f"{prefix}dispatch"): rows * (width + choices),
        ("bytes", f"{prefix}combine"): rows * width,
    }
