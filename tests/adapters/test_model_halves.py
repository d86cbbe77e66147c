"""Models in two halves of a batch: the logits of one batch, wherever the cut is, and the order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.batch_overlap import two_batch_overlap
from sglang.srt.batch_overlap.two_batch_overlap import compute_split_seq_index
from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from sglang_ext.core.overlap import (
    BEHIND_IN_DECODE,
    BEHIND_IN_PREFILL,
    Issued,
    exposed,
    trace_faults,
    two_batch,
)
from sglang_ext.srt.models import deepseek_v4_halves
from sglang_ext.srt.parallel import two_batch_verify
from sglang_ext.srt.spec.ranks import set_rows
from tests.adapters.halves_trace import Watch, issued, serially
from tests.adapters.model_world import ModelWorld, model_world
from tests.tiny import make_target

# Lengths of prompts and rows of a verification; blocks have 4 and 128 tokens, the indexer selects
# 16 or 32. In the first split a block of either length has rows in both halves of a verification.
SPLITS = {
    "inside a request": ((5, 248, 64), (1, 8, 2)),
    "between requests": ((40, 41, 42, 39), (4, 1, 3, 2)),
    "an empty half": ((61,), (1,)),
}
CUT = "inside a request"


@pytest.fixture(scope="module", params=["deepseek_v4", "deepseek_v32", "qwen3_moe"])
def world(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ModelWorld]:
    path: Path = make_target(tmp_path_factory.mktemp("halves") / "model", request.param)
    more = {"moe_a2a_backend": "deepep", "deepep_mode": "normal", "enable_two_batch_overlap": True}
    # As our worker has it: a verification is padded row by row.
    no_copy = envs.SGLANG_EAGER_INPUT_NO_COPY.override(True)
    with no_copy, model_world(path, "float32", **more) as found:
        last = found.model.config.num_hidden_layers - 1
        if request.param == "qwen3_moe":
            # A draft reads what a layer puts out, which is kept as the input of the next.
            found.model.set_dflash_layers_to_capture([0, last - 2, last - 1])
            # SGLang's block of experts leaves the exchange out of its halves on one rank.
            for layer in found.model.model.layers:
                layer.mlp.ep_size = 2
        else:
            found.model.set_dspark_layers_to_capture([0, last - 1, last])
        yield found


def _in_halves(batch: ForwardBatch) -> None:
    """What the scheduler, or our worker, says of a batch that is to be cut."""
    rows, lengths = batch.input_ids.shape[0], batch.extend_seq_lens_cpu
    batch.global_forward_mode = batch.forward_mode
    if batch.forward_mode.is_target_verify():
        batch.tbo_split_seq_index = 0
        set_rows(batch, rows, 1)
        return
    batch.tbo_split_seq_index = compute_split_seq_index(
        batch.forward_mode, rows, lengths, None if lengths else 1
    )
    batch.is_extend_in_batch = batch.forward_mode.is_extend()
    for name in ("global_num_tokens", "global_num_tokens_for_logprob"):
        setattr(batch, f"{name}_cpu", [rows])
        setattr(batch, f"{name}_gpu", torch.tensor([rows]))


def _run(world: ModelWorld, split: str) -> list[Tensor]:
    """Logits and features of a prefill, of one decode step and of a verification behind it."""
    lengths, drafts = SPLITS[split]
    return world.run([[(n + i) % 250 for i in range(n)] for n in lengths], drafts)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[ForwardBatch]:
    """From now on every batch is cut, and listed here."""
    original, found = ModelWorld._batch, []

    def in_halves(self: ModelWorld, *args: Any, **fields: Any) -> ForwardBatch:
        batch = original(self, *args, **fields)
        _in_halves(batch)
        found.append(batch)
        return batch

    monkeypatch.setattr(ModelWorld, "_batch", in_halves)
    return found


@pytest.fixture(scope="module")
def whole(world: ModelWorld) -> dict[str, list[Tensor]]:
    return {split: _run(world, split) for split in SPLITS}


@pytest.mark.parametrize("split", SPLITS)
def test_halves_equal_the_whole(
    world: ModelWorld, whole: dict[str, list[Tensor]], cuts: list[ForwardBatch], split: str
) -> None:
    for expected, found in zip(whole[split], _run(world, split), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    lengths, drafts = SPLITS[split]
    rows = [[child.input_ids.shape[0] for child in batch.tbo_children] for batch in cuts]
    assert [sum(pair) for pair in rows] == [sum(lengths), len(lengths), sum(drafts)]
    assert min(rows[0]) > 0
    for pair in rows[1:]:
        assert (min(pair) == 0) is (split == "an empty half")


def test_a_second_half_that_forgets_the_first_is_seen(
    world: ModelWorld,
    whole: dict[str, list[Tensor]],
    cuts: list[ForwardBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_batch_verify, "_share_request", lambda *_: None)
    *_, logits, features = _run(world, CUT)
    assert cuts
    for found, expected in ((logits, whole[CUT][-2]), (features, whole[CUT][-1])):
        assert (found - expected).abs().max() > 1e-2


def test_the_order_is_that_of_the_schedule(
    world: ModelWorld, cuts: list[ForwardBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One half's rows are under way before the other half computes, and none is read too early."""
    watch = Watch(world, monkeypatch)
    _run(world, CUT)
    assert len(watch.traces) == len(cuts) == 3
    prefill = two_batch(watch.prefill, watch.layers, BEHIND_IN_PREFILL)
    decode = two_batch(watch.decode, watch.layers, BEHIND_IN_DECODE)
    for trace, schedule in zip(watch.traces, (prefill, decode, decode), strict=True):
        found, expected = _order(issued(trace)), _order(schedule)
        # What prepares attention counts where both have it as a stage of its own.
        if not all(any(name == "prepare" for *_, name in order) for order in (found, expected)):
            found, expected = (
                [item for item in order if item[2] != "prepare"] for order in (found, expected)
            )
        assert found == expected
        assert trace_faults(trace) == []
        ends = (0, watch.layers - 1)
        assert all(layer in ends for _, layer, _ in exposed(issued(trace)))


def _order(items: list[Issued]) -> list[tuple[int, int, str]]:
    return [(item.half, item.layer, item.op.name) for item in items]


def test_halves_one_after_the_other_are_seen(
    world: ModelWorld, cuts: list[ForwardBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (two_batch_overlap, deepseek_v4_halves):
        run = module.execute_overlapped_operations
        monkeypatch.setattr(module, "execute_overlapped_operations", serially(run))
    watch = Watch(world, monkeypatch)
    _run(world, CUT)
    for trace in watch.traces:
        assert trace_faults(trace) == []
        assert len(exposed(issued(trace))) == 4 * watch.layers
