"""Native Sparse Attention against a loop, and against dense attention where it must equal it."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core import nsa
from sglang_ext.kernels.nsa import NsaKeys, NsaSpec, native_sparse_attention
from sglang_ext.kernels.nsa.reference import (
    native_sparse_attention_reference,
    selected_blocks_reference,
)
from sglang_ext.kernels.nsa_compress import compress_entries
from sglang_ext.kernels.nsa_compress.reference import compress_entries_reference
from tests.kernels.backend import MATMUL_DTYPES, Backend

pytestmark = pytest.mark.usefixtures("poisoned")

# (tokens, spec) and why.
CASES = {
    "overlapping entries": (61, NsaSpec(8, 4, 16, 3, 1, 1, 13)),
    "no entry yet": (7, NsaSpec(8, 4, 16, 3, 1, 1, 5)),
    "entry equals stride": (97, NsaSpec(4, 4, 8, 5, 1, 2, 11)),
    "entry equals block, none fixed first": (50, NsaSpec(8, 2, 8, 3, 0, 1, 3)),
    "many blocks": (311, NsaSpec(4, 2, 4, 6, 1, 2, 37)),
    "one token": (1, NsaSpec(4, 2, 4, 3, 1, 2, 1)),
}


def _inputs(
    tokens: int, spec: NsaSpec, positions: torch.Tensor, *, dim: int = 11, value_dim: int = 7
) -> tuple[torch.Tensor, NsaKeys, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows, key_heads, heads, entries = len(positions), 2, 6, spec.entries(tokens)
    keys = NsaKeys(
        draw(entries, key_heads, dim),
        draw(entries, key_heads, value_dim),
        draw(tokens, key_heads, dim),
        draw(tokens, key_heads, value_dim),
        draw(tokens, key_heads, dim),
        draw(tokens, key_heads, value_dim),
    )
    gates = torch.rand(rows, heads, 3, generator=generator)
    return 2 * draw(rows, heads, dim), keys, gates, positions


def _positions(tokens: int) -> torch.Tensor:
    drawn = torch.randint(0, tokens, (5,), generator=torch.Generator().manual_seed(tokens))
    return torch.cat((torch.tensor([0, tokens - 1]), drawn))


def _run(inputs: tuple, spec: NsaSpec, backend: Backend) -> torch.Tensor:
    q, keys, gates, positions = inputs
    return native_sparse_attention(
        backend.place(q), NsaKeys(*(backend.place(x) for x in keys)), backend.place(gates),
        backend.place(positions), spec, scale=0.3, implementation=backend.implementation,
    )  # fmt: skip


@pytest.mark.parametrize(("tokens", "spec"), CASES.values(), ids=CASES.keys())
def test_equals_the_reference(tokens: int, spec: NsaSpec, backend: Backend) -> None:
    inputs = _inputs(tokens, spec, _positions(tokens))
    found = _run(inputs, spec, backend)
    expected = native_sparse_attention_reference(*inputs, spec, 0.3)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-5, atol=2e-5)


def test_low_precision_keys(backend: Backend) -> None:
    spec, dtype = NsaSpec(8, 4, 16, 3, 1, 1, 13), MATMUL_DTYPES[1]
    q, keys, gates, positions = _inputs(61, spec, _positions(61))
    low = (q.to(dtype), NsaKeys(*(x.to(dtype) for x in keys)), gates.to(dtype), positions)
    found = _run(low, spec, backend)
    assert found.dtype == dtype
    expected = native_sparse_attention_reference(*low, spec, 0.3)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=2e-2, atol=2e-2)


def test_no_rows(backend: Backend) -> None:
    spec = NsaSpec(8, 4, 16, 3, 1, 1, 13)
    inputs = _inputs(20, spec, torch.zeros(0, dtype=torch.int64))
    assert _run(inputs, spec, backend).shape == (0, 6, 7)


@pytest.mark.parametrize("branch", [1, 2], ids=["selection", "window"])
def test_a_branch_that_sees_everything_is_dense_attention(branch: int, backend: Backend) -> None:
    spec, tokens = NsaSpec(8, 4, 16, 4, 1, 2, 64), 61
    q, keys, gates, positions = _inputs(tokens, spec, _positions(tokens))
    gates = torch.zeros_like(gates)
    gates[..., branch] = 1.0
    found = _run((q, keys, gates, positions), spec, backend)
    k, v = (x.repeat_interleave(3, dim=1) for x in keys[2 * branch : 2 * branch + 2])
    scores = torch.einsum("thd,khd->thk", q, k) * 0.3
    future = torch.arange(tokens) > positions.unsqueeze(1)
    weights = scores.masked_fill(future.unsqueeze(1), float("-inf")).softmax(-1)
    expected = torch.einsum("thk,khd->thd", weights, v)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-5, atol=2e-5)


def test_later_tokens_change_nothing(backend: Backend) -> None:
    """Everything after a query's position, and every entry that ends after it, is NaN."""
    spec, tokens, position = NsaSpec(8, 4, 16, 3, 1, 1, 13), 61, 29
    q, keys, gates, positions = _inputs(tokens, spec, torch.tensor([position]))
    expected = _run((q, keys, gates, positions), spec, backend)
    ended = int(nsa.visible_entries(positions, spec))
    limits = (ended, ended) + (position + 1,) * 4
    changed = [x.clone() for x in keys]
    for tensor, limit in zip(changed, limits, strict=True):
        tensor[limit:] = 1e4
    found = _run((q, NsaKeys(*changed), gates, positions), spec, backend)
    assert torch.equal(found, expected)


def test_importance_counts_shared_strides() -> None:
    """Entries of 4 tokens every 2, blocks of 4: entry 1 (tokens 2..5) is half in blocks 0 and 1."""
    spec = NsaSpec(4, 2, 4, 3, 1, 1, 4)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 1, 1, 4)
    found = nsa.block_importance(p, 3, spec)
    expected = [2 * 0.1 + 0.2, 0.2 + 2 * 0.3 + 0.4, 0.4]
    torch.testing.assert_close(found.view(-1), torch.tensor(expected))


def test_selection_is_fixed_blocks_then_importance_then_lowest() -> None:
    spec = NsaSpec(4, 4, 4, 4, 1, 2, 4)
    importance = torch.tensor([0.0, 0.5, 0.5, 0.9, 0.0, 0.0, 9.0]).view(1, 1, 7)
    # Query in block 5: block 6 is in its future, 0, 4 and 5 are fixed.
    assert nsa.select_blocks(importance, torch.tensor([21]), spec).view(-1).tolist() == [0, 3, 4, 5]
    importance[0, 0, 3] = 0.5
    assert nsa.select_blocks(importance, torch.tensor([21]), spec).view(-1).tolist() == [0, 1, 4, 5]
    assert nsa.select_blocks(importance, torch.tensor([5]), spec).view(-1).tolist() == [
        0,
        1,
        -1,
        -1,
    ]


def test_vectorised_selection_equals_the_reference() -> None:
    spec, tokens = NsaSpec(8, 4, 8, 4, 1, 1, 4), 83
    positions = torch.arange(tokens)
    q, keys, _, _ = _inputs(tokens, spec, positions)
    p = nsa.entry_probabilities(q, keys.k_entry, positions, spec, 0.3)
    found = nsa.select_blocks(nsa.block_importance(p, spec.blocks(tokens), spec), positions, spec)
    for row in range(tokens):
        for g in range(2):
            group = q[row, 3 * g : 3 * g + 3]
            expected = selected_blocks_reference(group, keys.k_entry[:, g], row, spec, 0.3)
            assert [b for b in found[row, g].tolist() if b >= 0] == expected


def test_entry_windows() -> None:
    x = torch.arange(11.0).view(11, 1, 1)
    spec = NsaSpec(4, 2, 4, 3, 1, 1, 4)
    windows = nsa.entry_windows(x, spec)
    assert windows.shape == (spec.entries(11), 4, 1, 1)
    assert windows[:, :, 0, 0].tolist() == [[2.0 * i + j for j in range(4)] for i in range(4)]
    assert nsa.entry_windows(x[:3], spec).shape == (0, 4, 1, 1)
    assert [spec.entries(n) for n in (3, 4, 5, 6)] == [0, 1, 1, 2]


@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "out_dim"),
    [(61, 2, 11, 7), (8, 1, 1, 1), (150, 3, 70, 66), (7, 2, 5, 3), (0, 2, 5, 3)],
)
def test_compression(
    tokens: int, heads: int, dim: int, out_dim: int, dtype: torch.dtype, backend: Backend
) -> None:
    """Tiles in every direction, one entry, no entry yet, no tokens."""
    spec = NsaSpec(8, 4, 16, 3, 1, 1, 13)
    generator = torch.Generator().manual_seed(tokens)
    x, position, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((tokens, heads, dim), (8, heads, dim), (heads, 8, dim, out_dim))
    )
    placed = [backend.place(part) for part in (x, position, weight)]
    found = compress_entries(*placed, spec, implementation=backend.implementation)
    assert found.dtype == dtype
    assert found.shape == (spec.entries(tokens), heads, out_dim)
    expected = compress_entries_reference(x, position, weight, spec)
    tolerance = 5e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


def test_compression_can_be_a_mean_and_knows_places(backend: Backend) -> None:
    spec = NsaSpec(8, 4, 16, 3, 1, 1, 13)
    x = torch.randn(41, 2, 5, generator=torch.Generator().manual_seed(0))
    position = torch.zeros(8, 2, 5)
    weight = (torch.eye(5) / 8).expand(2, 8, 5, 5)

    def run() -> torch.Tensor:
        placed = [backend.place(part) for part in (x, position, weight)]
        return compress_entries(*placed, spec, implementation=backend.implementation).cpu()

    mean = nsa.entry_windows(x, spec).mean(dim=1)
    torch.testing.assert_close(run(), mean, rtol=1e-5, atol=1e-6)
    position[3, 1] = 8.0
    mean[:, 1] += 1.0
    torch.testing.assert_close(run(), mean, rtol=1e-5, atol=1e-6)
    weight = torch.zeros(2, 8, 5, 5)
    weight[:, 6] = torch.eye(5)
    torch.testing.assert_close(run(), x[6:39:4], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", torch.zeros(9, 5), r"x: expected float \[tokens, key heads, dim\]"),
        ("position", torch.zeros(7, 2, 5), r"position: expected torch.float32 \[8, 2, 5\]"),
        ("weight", torch.zeros(2, 8, 4, 3), r"weight: expected torch.float32 \[2, 8, 5, 3\]"),
        ("weight", torch.zeros(2, 8, 5), r"weight: expected .* \[2, 8, 5, 'out dim'\]"),
        ("weight", torch.zeros(2, 8, 5, 3).half(), "weight: expected torch.float32"),
    ],
)
def test_compression_refuses(name: str, wrong: torch.Tensor, message: str) -> None:
    given = {
        "x": torch.zeros(9, 2, 5),
        "position": torch.zeros(8, 2, 5),
        "weight": torch.zeros(2, 8, 5, 3),
    }
    with pytest.raises(ValueError, match=message):
        compress_entries(**(given | {name: wrong}), spec=NsaSpec(8, 4, 16, 3, 1, 1, 13))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"length": 24}, "length: expected a multiple of the stride 16, found 24"),
        ({"block": 40}, "block: expected a multiple"),
        ({"length": 128}, "length: expected at most the block of 64"),
        ({"count": 2}, "count: expected at least first . local = 3"),
        ({"window": 0}, "window: expected at least 1"),
    ],
)
def test_spec_refuses(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NsaSpec(**sizes)


def test_refuses_missing_entries() -> None:
    spec = NsaSpec(8, 4, 16, 3, 1, 1, 13)
    q, keys, gates, positions = _inputs(61, spec, _positions(61))
    short = keys._replace(k_entry=keys.k_entry[1:])
    with pytest.raises(ValueError, match=r"k_entry: expected torch.float32 \[14, 2, 11\]"):
        native_sparse_attention(q, short, gates, positions, spec, scale=0.3)
