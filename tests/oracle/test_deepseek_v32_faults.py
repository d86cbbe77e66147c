"""Faults planted into our DeepSeek-V3.2: the comparison with HF sees each of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.core import indexer_v32
from sglang_ext.core.indexer_v32 import hadamard
from sglang_ext.core.rope import rotate_half_split, rotate_trailing_pairs
from sglang_ext.kernels.indexer_v32 import torch_select
from sglang_ext.srt.attention import dsa
from sglang_ext.srt.cache.dsa_pool import DsaTokenPool
from sglang_ext.srt.models import deepseek_v32_attention
from sglang_ext.tiny_model.deepseek_v32 import write
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle.test_deepseek_v32_hf import TOLERANCE, check_piecewise
from tests.oracle.v32 import load_hf
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.oracle

TOP_K = 7


@dataclasses.dataclass(frozen=True)
class Stage:
    world: ModelWorld
    hf: Any
    sequences: list[list[int]]

    def difference(self) -> float:
        """Largest difference to HF; infinite where a greedy token differs."""
        try:
            return check_piecewise(self.world, self.hf, self.sequences, seed=1)
        except AssertionError:
            return float("inf")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    path = tmp_path_factory.mktemp("faults") / "target"
    # One index head: many scores are exactly zero, so the tie rule shows.
    write(path, seed=5, mixing=1.0, index_topk=TOP_K, index_n_heads=1, num_hidden_layers=3)
    save_tokenizer(path)
    rng = random.Random(2)
    sequences = [rng.choices(range(256), k=n + 12) for n in (3, TOP_K, 30, 61)]
    with model_world(path, "float32") as world:
        yield Stage(world, load_hf(path), sequences)


def _half_split_trailing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    turned = rotate_half_split(x[..., -width:], cos, sin)
    return torch.cat((x[..., :-width], turned), dim=-1)


def _pairs_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    turned = rotate_trailing_pairs(x[..., :width], cos, sin)
    return torch.cat((turned, x[..., width:]), dim=-1)


def _latest_wins(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    known = scores.masked_fill(
        torch.arange(scores.shape[-1]) >= visible.unsqueeze(-1), float("-inf")
    )
    order = known.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    best = scores.shape[-1] - 1 - order[..., :top_k]
    return torch.zeros_like(known, dtype=torch.bool).scatter_(-1, best, True) & (
        known > float("-inf")
    )


def _shifted(by: int) -> Callable[..., Any]:
    original = dsa.group

    def group(*args: Any) -> list[Any]:
        return [
            dataclasses.replace(
                rows,
                visible=torch.where(rows.visible > 0, (rows.visible + by).clamp(1, rows.tokens), 0),
                first=None,
            )
            for rows in original(*args)
        ]

    return group


def _forgets_short_prompts(
    self: DsaTokenPool, layer_id: int, slots: Tensor, latent: Tensor, index_key: Tensor
) -> None:
    self.latents(layer_id).index_copy_(0, slots, latent)
    if len(slots) > TOP_K:
        self.index_keys(layer_id).index_copy_(0, slots, index_key)


_query = deepseek_v32_attention.index_query
_key = deepseek_v32_attention.index_key
FAULTS: dict[str, tuple[object, str, object]] = {
    "indexer rotates pairs": (indexer_v32, "rotate_first", _pairs_first),
    "indexer rotates the last dims": (indexer_v32, "rotate_first", _half_split_trailing),
    "attention rotates half-split": (
        deepseek_v32_attention,
        "rotate_trailing_pairs",
        _half_split_trailing,
    ),
    "hadamard on queries alone": (
        deepseek_v32_attention,
        "index_query",
        lambda *a: hadamard(_query(*a)),
    ),
    "hadamard on keys alone": (deepseek_v32_attention, "index_key", lambda *a: hadamard(_key(*a))),
    "no bias in the key norm": (
        deepseek_v32_attention,
        "index_key",
        lambda k, w, b, *more: _key(k, w, torch.zeros_like(b), *more),
    ),
    "rows see the next token": (dsa, "group", _shifted(1)),
    "rows do not see themselves": (dsa, "group", _shifted(-1)),
    "the latest of equal scores wins": (torch_select, "choose", _latest_wins),
    "no index keys from short prompts": (DsaTokenPool, "write", _forgets_short_prompts),
    "head weights left out": (
        deepseek_v32_attention,
        "head_weights",
        lambda p: torch.ones_like(p),
    ),
}


def test_without_a_fault(stage: Stage) -> None:
    assert stage.difference() < TOLERANCE


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(*FAULTS[name])
    assert stage.difference() > 100 * TOLERANCE


def test_hadamard_on_both_sides_changes_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepseek_v32_attention, "index_query", lambda *a: hadamard(_query(*a)))
    monkeypatch.setattr(deepseek_v32_attention, "index_key", lambda *a: hadamard(_key(*a)))
    assert stage.difference() < TOLERANCE
