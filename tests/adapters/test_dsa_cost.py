"""The bench of sparse attention's cost: it computes what it claims, and reads no more."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.dsa_cost import SHAPES, Layer, check, measure, memory


@pytest.mark.parametrize("title", SHAPES)
def test_rows_read_stay_at_top_k(title: str) -> None:
    shape = dataclasses.replace(SHAPES[title], dim=24, value_dim=16, index_dim=8, top_k=6)
    shape = dataclasses.replace(shape, window=min(shape.window, 5))
    check(shape)
    for context in (64, 256, 1024):
        layer = Layer.random(shape, context)
        chosen = layer.select()
        assert chosen.shape == (1, 6)
        unread = torch.ones(len(layer.entries), dtype=torch.bool)
        unread[chosen] = False
        if shape.ratio == 1:
            kept = layer.latents.masked_fill(unread[:, None], float("nan"))
            changed = dataclasses.replace(layer, latents=kept, entries=kept)
        else:
            far = torch.arange(context)[:, None] < context - shape.window
            changed = dataclasses.replace(
                layer,
                latents=layer.latents.masked_fill(far, float("nan")),
                entries=layer.entries.masked_fill(unread[:, None], float("nan")),
            )
        assert torch.equal(changed.sparse(chosen), layer.sparse(chosen))
        assert changed.dense().isnan().any()
    rows = measure(shape, [16, 64], repeats=1)
    assert [row["context"] for row in rows] == [16, 64]


def test_memory_by_hand() -> None:
    """bf16 rows of 512 and 64 + 512, fp32 compressor inputs, index keys of 128."""
    found = memory()
    assert found["DeepSeek-V4, ratio 4: latent"] == 1024
    assert found["DeepSeek-V4, ratio 4: raw"] == 4 * 4 * 512
    assert found["DeepSeek-V4, ratio 128: raw"] == 4 * 2 * 512
    assert found["DeepSeek-V4, ratio 4: index_raw"] == 4 * 4 * 128
    assert found["DeepSeek-V3.2: latent and index key"] == 2 * (512 + 64 + 128)
