"""fp8 in our DeepSeek-V3.2, in its weights and in its indexer, through the model against HF."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.tiny_model.deepseek_v32 import write
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle.test_deepseek_v32_hf import TOLERANCE, check_piecewise
from tests.oracle.v32 import load_hf
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.oracle

TOP_K, BLOCK, DIM = 7, 16, 16
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 3, "index_topk": TOP_K, "index_n_heads": 4, "index_head_dim": DIM,
}  # fmt: skip
SCALE = "_scale_inv"


def _sequences() -> list[list[int]]:
    rng = random.Random(2)
    return [rng.choices(range(256), k=n + 12) for n in (3, TOP_K, 30, 61)]


def _seen(world: ModelWorld, hf: Any) -> bool:
    """Whether the model is told from HF's."""
    try:
        return check_piecewise(world, hf, _sequences(), seed=1) > TOLERANCE
    except AssertionError:
        return True


def _stored(path: Path) -> dict[str, Tensor]:
    """An fp8 checkpoint whose scales differ from layer to layer and from block to block."""
    write(path, seed=3, mixing=1.0, fp8_block=(BLOCK, BLOCK), **FIELDS)
    save_tokenizer(path)
    tensors = load_file(path / "model.safetensors")
    for number, name in enumerate(sorted(n for n in tensors if n.endswith(SCALE))):
        scale = tensors[name]
        block = torch.arange(scale.numel()).view(scale.shape)
        tensors[name] = scale * 4.0 ** -((block + number) % 3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _wide(tensors: dict[str, Tensor], path: Path) -> Path:
    """The same weights by torch's own fp8, as a plain checkpoint."""
    write(path, mixing=1.0, **FIELDS)
    plain = {}
    for name, value in tensors.items():
        if name.endswith(SCALE):
            continue
        plain[name] = value
        if name + SCALE in tensors:
            scale = tensors[name + SCALE]
            each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            plain[name] = value.float() * each[: value.shape[0], : value.shape[1]]
    save_file(plain, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_fp8_weights_are_those_that_they_stand_for(tmp_path: Path) -> None:
    tensors = _stored(tmp_path / "stored")
    assert "quantization_config" in json.loads((tmp_path / "stored/config.json").read_text())
    hf = load_hf(_wide(tensors, tmp_path / "wide"))
    with model_world(tmp_path / "stored", "float32") as world:
        assert check_piecewise(world, hf, _sequences(), seed=1) < TOLERANCE


@pytest.mark.parametrize("swap", ["layers", "blocks"])
def test_swapped_scales_are_seen(tmp_path: Path, swap: str) -> None:
    """Of another layer's, or of another block's, in one tensor of the indexer."""
    tensors = _stored(tmp_path / "stored")
    wide = dict(tensors)
    names = [f"model.layers.{n}.self_attn.indexer.wq_b.weight{SCALE}" for n in (1, 2)]
    if swap == "layers":
        wide[names[0]], wide[names[1]] = tensors[names[1]], tensors[names[0]]
    else:
        wide[names[0]] = tensors[names[0]].roll(1, 0)
    hf = load_hf(_wide(wide, tmp_path / "wide"))
    with model_world(tmp_path / "stored", "float32") as world:
        assert _seen(world, hf)


def _rounded(x: Tensor) -> Tensor:
    """Turned by the Hadamard matrix, then e4m3 with the smallest power of two that fits."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    turned = x @ matrix * x.shape[-1] ** -0.5
    scale = 2.0 ** (turned.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    return (turned / scale).to(torch.float8_e4m3fn).float() * scale


@contextmanager
def _rounding_indexer() -> Iterator[None]:
    """HF's indexer with its queries and keys rounded, which it puts together by torch.cat."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    forward, cat = DeepseekV32Indexer.forward, torch.cat

    def rounding(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        with mock.patch.object(torch, "cat", joined):
            return forward(self, *args, **kwargs)

    def joined(parts: Any, dim: int = 0) -> Tensor:
        whole = cat(parts, dim)
        if whole.shape[-1] != DIM:  # half of the rotation
            return whole
        with mock.patch.object(torch, "cat", cat):
            return _rounded(whole)

    with mock.patch.object(DeepseekV32Indexer, "forward", rounding):
        yield


def test_an_fp8_indexer_selects_by_what_it_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "target", seed=4, mixing=1.0, **FIELDS)
    save_tokenizer(path)
    hf = load_hf(path)
    monkeypatch.setenv("SGLANG_EXT_INDEXER", "fp8")
    with model_world(path, "float32") as world:
        with _rounding_indexer():
            assert check_piecewise(world, hf, _sequences(), seed=1) < TOLERANCE
        assert _seen(world, hf), "rounding changes no selection here"
