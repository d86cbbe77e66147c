"""DeepSeek-V4's compressor, indexer and sparse attention against their naive versions."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.compress import CSA, HCA, block_positions, raw_width, visible_entries
from sglang_ext.kernels.compress import compress_blocks
from sglang_ext.kernels.compress import torch_compress as compress_chunks
from sglang_ext.kernels.compress.reference import compress_blocks_reference
from sglang_ext.kernels.indexer import select_entries, torch_select
from sglang_ext.kernels.indexer.reference import select_entries_reference
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention, torch_sparse
from sglang_ext.kernels.sparse_attention.reference import sparse_attention_reference


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("ratio", "last", "first"), [(CSA, 3, -1), (CSA, 11, 4), (HCA, 255, 128)])
def test_blocks_list_the_tokens_they_pool(ratio: int, last: int, first: int) -> None:
    rows = block_positions(torch.tensor([last]), ratio)[0].tolist()
    assert len(rows) == (8 if ratio == CSA else 128)
    assert (rows[0], rows[-1]) == (first, last)
    assert rows[-ratio:] == list(range(last - ratio + 1, last + 1))


def test_an_entry_is_seen_from_its_last_token_on() -> None:
    seen = visible_entries(torch.tensor([0, 2, 3, 4, 7, 127, 128]), 4)
    assert seen.tolist() == [0, 0, 1, 1, 2, 32, 32]
    assert visible_entries(torch.tensor([126, 127, 255]), 128).tolist() == [0, 1, 2]


@pytest.mark.parametrize("ratio", [CSA, HCA])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_compressor_equals_reference(
    ratio: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress_chunks, "CHUNK_ELEMENTS", chunk)
    dim, rope, blocks = 6, 4, 3
    raw = _random(600, raw_width(ratio, dim))
    raw[500:] = float("nan")
    last = torch.arange(1, blocks + 1) * ratio - 1
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    positions = block_positions(last, ratio)
    members = torch.where(positions < 0, -1, shuffled[positions.clamp(min=0)])
    angle = _random(blocks, rope // 2, seed=2)
    weight = 1 + 0.1 * _random(dim, seed=3)
    arguments = (raw, members, weight, 1e-6, angle.cos(), angle.sin())
    expected = compress_blocks_reference(*arguments, ratio)
    torch.testing.assert_close(compress_blocks(*arguments, ratio=ratio), expected)


@pytest.mark.parametrize("top_k", [1, 4, 11, 50])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_indexer_equals_reference(top_k: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads: many scores are exactly 0, so the tie rule decides."""
    monkeypatch.setattr(torch_select, "CHUNK_ELEMENTS", chunk)
    batch, rows, heads, dim, entries = 2, 5, 2, 3, 11
    pool = _random(64, dim)
    pool[0] = float("nan")
    slots = 1 + torch.stack(
        [
            torch.randperm(63, generator=torch.Generator().manual_seed(b))[:entries]
            for b in range(batch)
        ]
    )
    slots[1, 7:] = 0
    visible = torch.tensor([[0, 1, 4, 10, 11], [0, 2, 5, 6, 7]])
    arguments = (
        _random(batch, rows, heads, dim, seed=4),
        _random(batch, rows, heads, seed=5),
        pool,
        slots,
        visible,
        top_k,
    )
    assert torch.equal(select_entries(*arguments), select_entries_reference(*arguments))


@pytest.mark.parametrize("value_dim", [7, 5])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
@pytest.mark.parametrize("with_sink", [True, False])
def test_sparse_attention_equals_reference(
    value_dim: int, chunk: int, with_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sparse, "CHUNK_ELEMENTS", chunk)
    q = _random(5, 3, 7)
    generator = torch.Generator().manual_seed(7)
    sources = []
    for width, seed in ((4, 8), (3, 9)):
        pool = _random(20, 7, seed=seed)
        pool[0] = float("nan")
        index = torch.randint(1, 20, (5, width), generator=generator)
        index[torch.rand(5, width, generator=generator) < 0.3] = -1
        index[2] = -1
        sources.append(Rows(pool, index))
    sink = _random(3, seed=10) if with_sink else None
    expected = sparse_attention_reference(q, tuple(sources), sink, 0.4, value_dim)
    found = sparse_attention(q, tuple(sources), sink=sink, scale=0.4, value_dim=value_dim)
    torch.testing.assert_close(found, expected)
    assert not found[2].any()


def test_shapes_that_contradict_are_named() -> None:
    rows = Rows(torch.zeros(4, 6), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"sources\[0\].pool: expected \[4, 7\], found \[4, 6\]"):
        sparse_attention(torch.zeros(2, 1, 7), (rows,), sink=None, scale=1.0, value_dim=7)
    with pytest.raises(ValueError, match=r"members: expected \[2, 8\]"):
        compress_blocks(
            torch.zeros(4, 24), torch.zeros(2, 4, dtype=torch.int64), torch.ones(6), 1e-6,
            torch.ones(2, 1), torch.ones(2, 1), ratio=4,
        )  # fmt: skip
