"""The fast forward against SGLang's own, on whole tiny models inside a real ModelRunner."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang_ext.kernels.linear import packing_works
from sglang_ext.srt import fast_forward
from sglang_ext.srt.fast_forward.dense import flatten
from sglang_ext.srt.fast_forward.memory import packing_fits
from tests.adapters.fast_forward_switch import stock
from tests.adapters.model_world import ModelWorld, model_world
from tests.tiny import KINDS, LAYERS, make_target

DENSE = ("llama", "qwen2", "qwen3")
PROMPTS = [[5, 9, 200, 31, 7, 7, 90], [3], [250, 1, 2]]
DRAFTS = [5, 1, 3]
CAPTURED = [0, 2]


@pytest.fixture(scope="module", params=[(k, d) for k in KINDS for d in ("float32", "bfloat16")])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelWorld, str, str]]:
    kind, dtype = request.param
    path = make_target(tmp_path_factory.mktemp(f"{kind}-{dtype}"), kind)
    with model_world(path, dtype) as made:
        if hasattr(made.model, "set_dflash_layers_to_capture"):
            made.model.set_dflash_layers_to_capture(CAPTURED)
        else:
            made.model.set_eagle3_layers_to_capture(CAPTURED)
        yield made, kind, dtype


def test_extend_decode_and_verify_equal_the_stock_path(world: tuple[ModelWorld, str, str]) -> None:
    made, kind, dtype = world
    fast = made.run(PROMPTS, DRAFTS)
    with stock(made.model):
        expected = made.run(PROMPTS, DRAFTS)
    assert len(fast) == len(expected) == 6
    for got, want in zip(fast, expected, strict=True):
        scale = want.abs().max()
        bound = 1e-5 if dtype == "float32" else 0.04
        assert (got - want).abs().max() <= bound * scale, kind


def test_what_was_changed_is_counted(world: tuple[ModelWorld, str, str]) -> None:
    made, kind, dtype = world
    report = fast_forward.report_of(made.model)
    assert report is not None
    assert report.layers == (LAYERS if kind in DENSE else 0)
    packs = dtype == "bfloat16" and packing_works()
    assert (report.linears > 0) is packs
    if kind not in DENSE:
        assert any("Qwen3MoeModel" in reason for reason in report.left)


def test_replaced_weights_are_used_after_a_refresh(world: tuple[ModelWorld, str, str]) -> None:
    made, _, _ = world
    before = made.run(PROMPTS, DRAFTS)
    kept = [p.detach().clone() for p in made.model.parameters()]
    try:
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.data.mul_(0.5)
        fast_forward.refresh(made.model)
        fast = made.run(PROMPTS, DRAFTS)
        with stock(made.model):
            expected = made.run(PROMPTS, DRAFTS)
    finally:
        for parameter, value in zip(made.model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        fast_forward.refresh(made.model)
    assert (fast[0] - before[0]).abs().max() > 0.1 * before[0].abs().max()
    for got, want in zip(fast, expected, strict=True):
        assert (got - want).abs().max() <= 0.04 * want.abs().max()
    again = made.run(PROMPTS, DRAFTS)
    assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True))


def test_a_forward_hook_brings_the_stock_layers_back(world: tuple[ModelWorld, str, str]) -> None:
    made, _, _ = world
    seen: list[int] = []
    watched = made.model.model.layers[1].self_attn.o_proj
    handle = watched.register_forward_hook(lambda *_: seen.append(1))
    try:
        made.run(PROMPTS, DRAFTS)
    finally:
        handle.remove()
    assert len(seen) == 3


@pytest.mark.skipif(not packing_works(), reason="this processor packs no bf16 weights")
def test_weights_are_packed_only_where_a_second_copy_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    free = SimpleNamespace(available=4 * model.weight.nbytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert packing_fits(model)
    free.available -= 1
    assert not packing_fits(model)


def test_a_model_without_a_decoder_stack_is_left_alone() -> None:
    assert flatten(torch.nn.Linear(4, 4), pack=True) == (None, [])
