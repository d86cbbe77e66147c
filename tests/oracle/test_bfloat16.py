"""Both DeepSeek models in bfloat16: as close to HF's float32 as HF's own bfloat16 is.

A greedy token may differ from float32's where rounding moves two logits past each other: the
margin between float32's two best is then smaller than what rounding moved at that position.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle import v4, v32
from tests.oracle.v32 import Sequences
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.oracle

PROMPT, STEPS = 30, 30
MODELS = {"v4": (deepseek_v4.write, v4), "v32": (deepseek_v32.write, v32)}


def _ours(world: ModelWorld, sequence: list[int]) -> Tensor:
    """[steps + 1, vocab]: a prefill, then decode steps."""
    play = Sequences(world, [sequence])
    rows = [play.extend({0: PROMPT})[0]]
    return torch.stack(rows + [play.decode([0])[0] for _ in range(STEPS)]).float()


def _rms(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).square().mean().sqrt())


@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_that_of_the_dtype(
    tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    write, hf = MODELS[name]
    path = write(tmp_path / name, seed=1, index_topk=8)
    if name == "v32":
        save_tokenizer(path)
    sequences = [random.Random(s).choices(range(256), k=PROMPT + STEPS) for s in range(3)]
    exact = [_kept(hf, hf.load_hf(path), s) for s in sequences]
    theirs = [_kept(hf, hf.load_hf(path).bfloat16(), s) for s in sequences]
    with model_world(path, "bfloat16") as world:
        ours = [_ours(world, s) for s in sequences]
    error = [a - b for a, b in zip(ours, exact, strict=True)]
    allowed = _rms([a - b for a, b in zip(theirs, exact, strict=True)])
    record_property("rms of ours and of HF's own", (_rms(error), allowed))
    assert _rms(error) < 1.5 * allowed
    tokens, wanted = torch.cat(ours).argmax(-1), torch.cat(exact)
    differs = tokens != wanted.argmax(-1)
    top = wanted.topk(2).values
    margins = (top[:, 0] - top[:, 1])[differs]
    moved = torch.cat(error).abs().amax(dim=-1)[differs]
    record_property("margins and largest moves", torch.stack([margins, moved], 1).tolist())
    assert differs.sum() <= 0.05 * len(differs)
    assert (margins < 2 * moved).all()


def _kept(hf: ModuleType, model: torch.nn.Module, sequence: list[int]) -> Tensor:
    logits: Tensor = hf.hf_logits(model, sequence)
    return logits[PROMPT - 1 :].float()
