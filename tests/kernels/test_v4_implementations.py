"""DeepSeek-V4's compressor, indexer and sparse attention: every implementation, hard shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_ext.core.compress import CSA, HCA, block_positions, raw_width
from sglang_ext.kernels.compress import compress_blocks
from sglang_ext.kernels.compress.reference import compress_blocks_reference
from sglang_ext.kernels.index_vectors import index_query_v4
from sglang_ext.kernels.index_vectors.reference import index_query_v4_reference
from sglang_ext.kernels.indexer import select_entries
from sglang_ext.kernels.indexer.reference import select_entries_reference
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention
from sglang_ext.kernels.sparse_attention.reference import sparse_attention_reference
from sglang_ext.kernels.top_k import best_entries
from sglang_ext.kernels.top_k.reference import best_entries_reference
from tests.kernels.backend import INTERPRETED, MATMUL_DTYPES, Backend

pytestmark = pytest.mark.usefixtures("poisoned")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _compress_inputs(ratio: int, dim: int, rope: int, blocks: int) -> tuple[Tensor, ...]:
    """Blocks at scattered pool rows; rows that no block names are NaN."""
    raw = torch.full((ratio * (blocks + 3), raw_width(ratio, dim)), float("nan"))
    order = torch.randperm(len(raw), generator=torch.Generator().manual_seed(1))
    used = order[: ratio * blocks]
    raw[used] = 3 * _random(len(used), raw.shape[1], seed=2)
    positions = block_positions(torch.arange(1, blocks + 1) * ratio - 1, ratio)
    members = torch.where(positions < 0, -1, order[positions.clamp(min=0)])
    angle = _random(blocks, rope // 2, seed=3)
    return raw, members, 1 + 0.1 * _random(dim, seed=4), angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("ratio", "dim", "rope", "blocks"),
    [(CSA, 22, 8, 5), (CSA, 64, 64, 1), (CSA, 6, 4, 0), (HCA, 10, 4, 2), (HCA, 32, 2, 1)],
)
def test_compressor(ratio: int, dim: int, rope: int, blocks: int, backend: Backend) -> None:
    raw, members, weight, cos, sin = _compress_inputs(ratio, dim, rope, blocks)
    placed = [backend.place(x) for x in (raw, members, weight)]
    found = compress_blocks(
        *placed, 1e-2, backend.place(cos), backend.place(sin), ratio=ratio,
        implementation=backend.implementation,
    )  # fmt: skip
    expected = compress_blocks_reference(raw, members, weight, 1e-2, cos, sin, ratio)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "half"),
    [(1, 1, 2, 1), (5, 7, 11, 3), (3, 2, 40, 20), (0, 2, 8, 2), (2, 3, 8, 0)],
)
def test_index_queries(
    tokens: int, heads: int, dim: int, half: int, dtype: torch.dtype, backend: Backend
) -> None:
    q, angle = _random(tokens, heads, dim).to(dtype), 3 * _random(tokens, half, seed=1)
    arguments = [backend.place(x) for x in (q, angle.cos(), angle.sin())]
    found = index_query_v4(*arguments, implementation=backend.implementation)
    assert found.dtype == dtype
    expected = index_query_v4_reference(q, angle.cos(), angle.sin()).to(dtype)
    loose = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found.cpu(), expected, **loose)


def test_an_odd_dim_is_refused_by_name() -> None:
    raw, members, weight, cos, sin = _compress_inputs(CSA, 7, 4, 2)
    arguments = (raw, members, weight, 1e-6, cos, sin)
    found = compress_blocks(*arguments, ratio=CSA)
    torch.testing.assert_close(found, compress_blocks_reference(*arguments, CSA))
    with pytest.raises(ValueError, match="expected an even dim for 'triton', found 7"):
        compress_blocks(*arguments, ratio=CSA, implementation="triton")


def _index_inputs(batch: int, rows: int, heads: int, dim: int, entries: int) -> tuple[Tensor, ...]:
    pool = _random(batch * entries + 7, dim)
    pool[0] = float("nan")
    order = torch.randperm(batch * entries, generator=torch.Generator().manual_seed(1))
    slots = 1 + order.view(batch, entries)
    generator = torch.Generator().manual_seed(2)
    visible = torch.randint(0, entries + 1, (batch, rows), generator=generator)
    visible[:, -1] = entries
    # Slots beyond what any row of the request sees name the row of NaN.
    visible[-1].clamp_(max=entries - 2)
    slots[-1, entries - 2 :] = 0
    q = _random(batch, rows, heads, dim, seed=3)
    return q, _random(batch, rows, heads, seed=4), pool, slots, visible


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "dim", "entries", "top_k"),
    [
        pytest.param(2, 5, 2, 3, 11, 4, id="two heads, most scores are 0"),
        pytest.param(1, 11, 20, 40, 67, 13, id="beyond one tile everywhere"),
        pytest.param(3, 1, 4, 16, 37, 1, id="one row each, the best alone"),
        pytest.param(2, 3, 2, 5, 9, 9, id="room for all"),
        pytest.param(2, 3, 2, 5, 9, 50, id="more room than entries"),
    ],
)
def test_indexer(
    batch: int, rows: int, heads: int, dim: int, entries: int, top_k: int, backend: Backend
) -> None:
    inputs = _index_inputs(batch, rows, heads, dim, entries)
    found = select_entries(
        *(backend.place(x) for x in inputs), top_k, implementation=backend.implementation
    )
    assert torch.equal(found.cpu(), select_entries_reference(*inputs, top_k))


def test_indexer_without_rows_or_entries(backend: Backend) -> None:
    q, weights, pool, slots, visible = _index_inputs(2, 3, 2, 5, 9)
    options = {"implementation": backend.implementation}
    none = [backend.place(x) for x in (q[:, :0], weights[:, :0], pool, slots, visible[:, :0])]
    assert select_entries(*none, 4, **options).shape == (2, 0, 4)
    empty = [backend.place(x) for x in (q, weights, pool, slots[:, :0], visible * 0)]
    assert select_entries(*empty, 4, **options).shape == (2, 3, 0)


def _listed(batch: int, rows: int, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values of entries in any order, and some rows that see few entries or none."""
    generator = torch.Generator().manual_seed(entries)
    values = torch.randperm(batch * entries, generator=generator).view(batch, entries)
    visible = torch.randint(0, entries + 1, (batch, rows), generator=generator)
    visible[0, :1] = entries
    return _random(batch, rows, entries, seed=11), values, visible


@pytest.mark.parametrize("kind", ["any", "few values", "all equal"])
@pytest.mark.parametrize(
    ("batch", "rows", "entries", "top_k"),
    [(2, 5, 11, 4), (1, 3, 2500, 1100), (3, 2, 1024, 1), (2, 3, 7, 9), (2, 0, 5, 2), (2, 3, 0, 2)],
)
def test_best_entries(
    batch: int, rows: int, entries: int, top_k: int, kind: str, backend: Backend
) -> None:
    scores, values, visible = _listed(batch, rows, entries)
    if kind == "few values":
        # Both zeros among them, which are one.
        scores = scores.round().clamp(-1, 1) * 1e-3
    elif kind == "all equal":
        scores = torch.full_like(scores, -2.5)
    unseen = torch.arange(entries) >= visible.unsqueeze(-1)
    placed = [backend.place(x) for x in (scores.masked_fill(unseen, float("nan")), values, visible)]
    found = best_entries(*placed, top_k, implementation=backend.implementation)
    assert torch.equal(found.cpu(), best_entries_reference(scores, values, visible, top_k))


def test_best_entries_of_every_size(backend: Backend) -> None:
    """Neighbours in every digit of the float, both infinities, subnormal numbers."""
    one = torch.tensor([1.0, 1e-3, 3e38, 1e-40, 2.5e-39])
    near = torch.cat([one.view(torch.int32) + step for step in (0, 1, 255, 256, 65536)])
    ends = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    scores = torch.cat((near.view(torch.float32), -near.view(torch.float32), ends))
    scores = scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))]
    scores = scores[~scores.isnan()].view(1, 1, -1)
    values = torch.arange(scores.shape[-1]).unsqueeze(0)
    visible = torch.tensor([[scores.shape[-1]]])
    placed = [backend.place(x) for x in (scores, values, visible)]
    for top_k in range(1, scores.shape[-1] + 1):
        found = best_entries(*placed, top_k, implementation=backend.implementation)
        assert torch.equal(found.cpu(), best_entries_reference(scores, values, visible, top_k))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("scores", torch.zeros(2, 3, 5).half(), "scores: expected float32 .* found torch.float16"),
        ("values", torch.zeros(2, 4).long(), r"values: expected int64 \[2, 5\]"),
        ("values", torch.zeros(2, 5).int(), r"values: expected int64 \[2, 5\], found torch.int32"),
        ("visible", torch.zeros(3, 2).long(), r"visible: expected int64 \[2, 3\]"),
        ("top_k", 0, "top_k: expected at least 1, found 0"),
    ],
)
def test_best_entries_refuse(name: str, wrong: object, message: str) -> None:
    scores, values, visible = _listed(2, 3, 5)
    given: dict[str, object] = {"scores": scores, "values": values, "visible": visible, "top_k": 2}
    with pytest.raises(ValueError, match=message):
        best_entries(**(given | {name: wrong}))  # type: ignore[arg-type]


@pytest.mark.skipif(not INTERPRETED, reason="the chunks of the Triton path")
def test_indexer_in_chunks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.kernels import ordered

    monkeypatch.setattr(ordered, "CHUNK_ELEMENTS", 2 * 11 * 3)
    inputs = _index_inputs(2, 8, 2, 3, 11)
    found = select_entries(*inputs, 4, implementation="triton")
    assert torch.equal(found, select_entries_reference(*inputs, 4))


def _attention_inputs(
    queries: int, heads: int, dim: int, widths: tuple[int, ...]
) -> tuple[Tensor, tuple[Rows, ...], Tensor]:
    generator = torch.Generator().manual_seed(7)
    sources = []
    for number, width in enumerate(widths):
        pool = _random(50, dim, seed=8 + number)
        pool[0] = float("nan")
        index = torch.randint(1, 50, (queries, width), generator=generator)
        index[torch.rand(queries, width, generator=generator) < 0.3] = -1
        index[2:3] = -1
        sources.append(Rows(pool, index))
    return 2 * _random(queries, heads, dim), tuple(sources), _random(heads, seed=10)


@pytest.mark.parametrize("with_sink", [True, False], ids=["sink", "no sink"])
@pytest.mark.parametrize(
    ("queries", "heads", "dim", "value_dim", "widths"),
    [
        pytest.param(5, 3, 7, 7, (4, 3), id="below a tile"),
        pytest.param(4, 19, 40, 40, (33, 37), id="heads and keys beyond a tile"),
        pytest.param(3, 2, 24, 16, (21,), id="one source, values narrower than rows"),
        pytest.param(3, 2, 7, 5, (5, 0), id="second source empty"),
        pytest.param(0, 2, 16, 16, (5, 5), id="no queries"),
    ],
)
def test_sparse_attention(
    queries: int,
    heads: int,
    dim: int,
    value_dim: int,
    widths: tuple[int, ...],
    with_sink: bool,
    backend: Backend,
) -> None:
    q, sources, sink = _attention_inputs(queries, heads, dim, widths)
    placed = tuple(Rows(backend.place(s.pool), backend.place(s.index)) for s in sources)
    found = sparse_attention(
        backend.place(q), placed, sink=backend.place(sink) if with_sink else None,
        scale=0.4, value_dim=value_dim, implementation=backend.implementation,
    )  # fmt: skip
    expected = sparse_attention_reference(q, sources, sink if with_sink else None, 0.4, value_dim)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-5, atol=2e-5)
    assert not found[2:3].any()


def test_sparse_attention_over_pools_of_two_dtypes(backend: Backend) -> None:
    q, sources, sink = _attention_inputs(4, 3, 16, (9, 7))
    low = MATMUL_DTYPES[1]
    mixed = (sources[0]._replace(pool=sources[0].pool.to(low)), sources[1])
    placed = tuple(Rows(backend.place(s.pool), backend.place(s.index)) for s in mixed)
    for dtype, tolerance in ((torch.float32, 2e-5), (low, 2e-2)):
        found = sparse_attention(
            backend.place(q.to(dtype)), placed, sink=backend.place(sink), scale=0.4, value_dim=16,
            implementation=backend.implementation,
        )  # fmt: skip
        assert found.dtype == dtype
        expected = sparse_attention_reference(q.to(dtype), mixed, sink, 0.4, 16)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


def test_a_query_without_rows_gives_zero_whatever_the_sink(backend: Backend) -> None:
    q, sources, _ = _attention_inputs(3, 2, 16, (4, 4))
    placed = tuple(Rows(backend.place(s.pool), backend.place(s.index * 0 - 1)) for s in sources)
    for sink in (None, backend.place(torch.tensor([-1e4, 1e4]))):
        found = sparse_attention(
            backend.place(q), placed, sink=sink, scale=1.0, value_dim=16,
            implementation=backend.implementation,
        )  # fmt: skip
        assert not found.any()


def test_three_sources_are_refused() -> None:
    q, sources, sink = _attention_inputs(3, 2, 16, (4, 4, 4))
    with pytest.raises(ValueError, match=r"expected one or two sources .* found 3 and 16"):
        sparse_attention(q, sources, sink=sink, scale=1.0, value_dim=16)
