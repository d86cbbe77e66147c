"""SGLANG_EXT_INDEX_SHARE: HF's model, told to reuse an earlier layer's selection, says the same.

That the default shares nothing is what every other comparison with HF shows.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.adapters.model_world import model_world
from tests.oracle import v4, v32
from tests.oracle.test_deepseek_v4_hf import TOLERANCE, check_piecewise
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.oracle

EVERY = 2


def _sharing(hf: Any) -> Any:
    """HF's model with every EVERY-th indexer choosing, the others repeating it."""
    chosen: list[Any] = []

    def wrap(module: Any, number: int) -> None:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if number % EVERY == 0:
                chosen[:] = [own(*args, **kwargs)]
            return chosen[0]

        module.forward = forward

    indexers = [m for m in hf.modules() if type(m).__name__.endswith("Indexer")]
    assert len(indexers) == 3
    for number, module in enumerate(indexers):
        wrap(module, number)
    return hf


@pytest.mark.parametrize("model", ["V4", "V3.2"])
def test_shared_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    fields: dict[str, Any] = {"seed": 2, "mixing": 1.0, "index_topk": 5, "index_n_heads": 16}
    if model == "V4":
        load, ratios = v4, [0, 4, 128, 4, 4]
        path = deepseek_v4.write(tmp_path, layers=len(ratios), compress_ratios=ratios, **fields)
    else:
        load, path = v32, deepseek_v32.write(tmp_path, num_hidden_layers=3, **fields)
        save_tokenizer(path)
    sequences = [random.Random(n).choices(range(256), k=n) for n in (14, 90, 150)]
    alone = [load.hf_logits(load.load_hf(path), s) for s in sequences]
    shared = [load.hf_logits(_sharing(load.load_hf(path)), s) for s in sequences]
    assert max(float((a - s).abs().max()) for a, s in zip(alone, shared, strict=True)) > 0.01
    monkeypatch.setenv("SGLANG_EXT_INDEX_SHARE", str(EVERY))
    with model_world(path, "float32") as world:
        assert check_piecewise(world, shared, sequences, seed=1) < TOLERANCE
