"""DeepSeek-V4 and V3.2 in two halves of a batch: the logits of one batch, wherever the cut is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.batch_overlap.two_batch_overlap import compute_split_seq_index
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from tests.adapters.model_world import ModelWorld, model_world
from tests.tiny import make_target

# Lengths of prompts; blocks have 4 and 128 tokens, the indexer selects 16 or 32.
SPLITS = {
    "inside a request": (5, 131, 8, 64),
    "between requests": (40, 41, 42, 39),
    "an empty half": (61,),
}


@pytest.fixture(scope="module", params=["deepseek_v4", "deepseek_v32"])
def world(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ModelWorld]:
    path: Path = make_target(tmp_path_factory.mktemp("halves") / "model", request.param)
    more = {"moe_a2a_backend": "deepep", "deepep_mode": "normal", "enable_two_batch_overlap": True}
    with model_world(path, "float32", **more) as found:
        yield found


def _in_halves(batch: ForwardBatch) -> None:
    """What the scheduler says of a batch that is to be cut."""
    rows, lengths = batch.input_ids.shape[0], batch.extend_seq_lens_cpu
    batch.tbo_split_seq_index = compute_split_seq_index(
        batch.forward_mode, rows, lengths, None if lengths else 1
    )
    batch.global_forward_mode = batch.forward_mode
    batch.is_extend_in_batch = batch.forward_mode.is_extend()
    for name in ("global_num_tokens", "global_num_tokens_for_logprob"):
        setattr(batch, f"{name}_cpu", [rows])
        setattr(batch, f"{name}_gpu", torch.tensor([rows]))


def _logits(world: ModelWorld, prompts: list[list[int]]) -> list[Tensor]:
    """Of a prefill and of one decode step behind it."""
    return world.run(prompts, [1] * len(prompts))


@pytest.mark.parametrize("split", SPLITS)
def test_halves_equal_the_whole(
    world: ModelWorld, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    prompts = [[(n + i) % 250 for i in range(n)] for n in SPLITS[split]]
    expected = _logits(world, prompts)
    original = ModelWorld._batch
    cuts = []

    def in_halves(self: ModelWorld, *args: Any, **fields: Any) -> ForwardBatch:
        batch = original(self, *args, **fields)
        if not batch.forward_mode.is_target_verify():
            _in_halves(batch)
            cuts.append(batch)
        return batch

    monkeypatch.setattr(ModelWorld, "_batch", in_halves)
    found = _logits(world, prompts)
    for whole, halves in zip(expected, found, strict=True):
        torch.testing.assert_close(halves, whole, atol=2e-5, rtol=1e-4)
    rows = [[child.input_ids.shape[0] for child in batch.tbo_children] for batch in cuts]
    assert [sum(pair) for pair in rows] == [sum(SPLITS[split]), len(prompts)]
    assert min(rows[0]) > 0
    assert (min(rows[1]) == 0) is (split == "an empty half")
