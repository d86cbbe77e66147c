"""The planner's split of attention's weights and of layers over stages is what is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from torch import nn

from sglang_ext.planner.layout import Layout
from sglang_ext.planner.shape import read_shape
from sglang_ext.srt.models.deepseek_v4_attention import GroupedLinear, SharedLatentAttention
from sglang_ext.srt.models.deepseek_v32_attention import LatentAttention
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.adapters.model_world import model_world
from tests.tiny import save_tokenizer

SPLIT = (ColumnParallelLinear, RowParallelLinear, GroupedLinear)
Write = Callable[[Path], Path]


def _count(module: nn.Module, *kinds: type) -> int:
    """Weights of the linear layers of `kinds` inside `module`."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, kinds))  # type: ignore[arg-type, operator, misc]


@pytest.mark.parametrize("write", [deepseek_v4.write, deepseek_v32.write])
def test_what_every_rank_holds_whole(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "model")
    if write is deepseek_v32.write:
        save_tokenizer(path)
    shape = read_shape(json.loads((path / "config.json").read_text()))
    with model_world(path, "float32") as world:
        layers = [
            m
            for m in world.runner.model.modules()
            if isinstance(m, SharedLatentAttention | LatentAttention)
        ]
        whole = sum(_count(layer, ReplicatedLinear) for layer in layers)
        split = sum(_count(layer, *SPLIT) for layer in layers)
        chosen = sum(_count(layer.indexer, ReplicatedLinear) for layer in layers if layer.indexer)
    assert len(layers) == shape.layers
    assert shape.attention_params == whole + split
    assert shape.attention_per_rank(4) == whole + split / 4
    assert shape.indexer_params == chosen


@pytest.mark.parametrize("layers", [36, 61, 94])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_stage_holds_the_layers_that_sglang_gives_it(layers: int, stages: int) -> None:
    layout = Layout(1, 8, pp=stages)
    for stage in range(stages):
        held = layout.layers_of(stage, layers)
        assert (held.start, held.stop) == get_pp_indices(layers, stage, stages)
