"""DeepSeek-V3.2's latent attention and indexer: every implementation, hard shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_ext.core.quant import act_quant
from sglang_ext.kernels.index_vectors import Precision, index_key, index_query
from sglang_ext.kernels.index_vectors.reference import index_key_reference, index_query_reference
from sglang_ext.kernels.indexer_v32 import select_tokens, select_tokens_fp8
from sglang_ext.kernels.indexer_v32.reference import (
    select_tokens_fp8_reference,
    select_tokens_reference,
)
from sglang_ext.kernels.latent_attention import attend_expanded, attend_visible
from sglang_ext.kernels.latent_attention.reference import (
    attend_expanded_reference,
    attend_visible_reference,
)
from tests.kernels.backend import INTERPRETED, MATMUL_DTYPES, Backend

pytestmark = pytest.mark.usefixtures("poisoned")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _visible(batch: int, rows: int, tokens: int) -> Tensor:
    """Some rows that see nothing, one that sees all, and a request that ends early."""
    generator = torch.Generator().manual_seed(2)
    visible = torch.randint(0, tokens + 1, (batch, rows), generator=generator)
    visible[0, -1] = tokens
    if batch > 1:
        visible[-1].clamp_(max=max(tokens - 2, 0))
    return visible


def _unseen_is_nan(x: Tensor, visible: Tensor) -> Tensor:
    """NaN in what no row of its request sees; x [batch, tokens, dim]."""
    beyond = torch.arange(x.shape[1]) >= visible.amax(dim=1, keepdim=True)
    return x.masked_fill(beyond.unsqueeze(-1), float("nan"))


ATTENTION = [
    pytest.param(1, 1, 1, 1, 2, 1, id="one of everything"),
    pytest.param(3, 5, 7, 11, 2, 13, id="prime sizes"),
    pytest.param(2, 3, 2, 8, 0, 9, id="no rotary part"),
    pytest.param(2, 2, 19, 40, 24, 67, id="heads and tokens beyond a tile"),
    pytest.param(2, 0, 2, 8, 2, 5, id="no rows"),
]


@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "rows", "heads", "latent", "rope", "tokens"), ATTENTION)
def test_visible(
    batch: int, rows: int, heads: int, latent: int, rope: int, tokens: int,
    dtype: torch.dtype, backend: Backend,
) -> None:  # fmt: skip
    q = _random(batch, rows, heads, latent + rope).to(dtype)
    visible = _visible(batch, rows, tokens) if rows else torch.zeros(batch, 0, dtype=torch.int64)
    cached = _random(batch, tokens, latent + rope, seed=1).to(dtype)
    cached = _unseen_is_nan(cached, visible) if rows else cached
    found = attend_visible(
        *(backend.place(x) for x in (q, cached, visible)), latent, 0.3,
        implementation=backend.implementation,
    )  # fmt: skip
    assert found.dtype == dtype
    expected = attend_visible_reference(q, cached, visible, latent, 0.3)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    assert not found[backend.place(visible) == 0].any()


@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("first", "rows", "heads", "dim", "value"),
    [
        pytest.param(0, 1, 1, 2, 1, id="one of everything"),
        pytest.param(7, 5, 3, 11, 7, id="prime sizes behind a prefix"),
        pytest.param(0, 37, 2, 24, 40, id="rows beyond a tile, values wider than keys"),
        pytest.param(33, 35, 2, 24, 16, id="a prefix beyond a tile"),
    ],
)
def test_expanded(
    first: int, rows: int, heads: int, dim: int, value: int, dtype: torch.dtype, backend: Backend
) -> None:
    q = _random(rows, heads, dim).to(dtype)
    keys = _random(first + rows, heads, dim, seed=1).to(dtype)
    values = _random(first + rows, heads, value, seed=2).to(dtype)
    found = attend_expanded(
        *(backend.place(x) for x in (q, keys, values)), first, 0.2,
        implementation=backend.implementation,
    )  # fmt: skip
    assert found.dtype == torch.float32
    expected = attend_expanded_reference(q, keys, values, first, 0.2)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


INDEX = [
    pytest.param(2, 5, 2, 3, 11, 4, id="two heads, most scores are 0"),
    pytest.param(1, 11, 20, 40, 67, 13, id="beyond one tile everywhere"),
    pytest.param(3, 1, 4, 16, 37, 1, id="one row each, the best alone"),
    pytest.param(2, 3, 2, 5, 9, 9, id="room for all"),
    pytest.param(2, 3, 2, 5, 9, 50, id="more room than tokens"),
    pytest.param(2, 0, 2, 5, 9, 4, id="no rows"),
]


def _index_inputs(
    batch: int, rows: int, heads: int, dim: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visible = _visible(batch, rows, tokens) if rows else torch.zeros(batch, 0, dtype=torch.int64)
    q, keys = _random(batch, rows, heads, dim, seed=3), _random(batch, tokens, dim, seed=5)
    return q, _random(batch, rows, heads, seed=4), keys, visible


@pytest.mark.parametrize(("batch", "rows", "heads", "dim", "tokens", "top_k"), INDEX)
def test_indexer(
    batch: int, rows: int, heads: int, dim: int, tokens: int, top_k: int, backend: Backend
) -> None:
    q, weights, keys, visible = _index_inputs(batch, rows, heads, dim, tokens)
    keys = _unseen_is_nan(keys, visible) if rows else keys
    found = select_tokens(
        *(backend.place(x) for x in (q, weights, keys, visible)), top_k,
        implementation=backend.implementation,
    )  # fmt: skip
    assert torch.equal(found.cpu(), select_tokens_reference(q, weights, keys, visible, top_k))


def _stored(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [..., dim], scales [..., blocks]) of vectors whose sizes differ by powers of two."""
    sizes = 2.0 ** torch.arange(-9, 9).repeat(x.numel())[: x[..., 0].numel()]
    rows = (x.flatten(0, -2) * sizes[:, None]).contiguous()
    codes, scale = act_quant(rows, block=128)
    return (codes.view(torch.uint8).view(x.shape), scale.view(torch.uint8).view(*x.shape[:-1], -1))


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "dim", "tokens", "top_k"),
    [*INDEX[:-1], pytest.param(1, 3, 4, 150, 37, 5, id="two scales per vector, the second short")],
)
def test_indexer_over_fp8_bytes(
    batch: int, rows: int, heads: int, dim: int, tokens: int, top_k: int, backend: Backend
) -> None:
    q, weights, keys, visible = _index_inputs(batch, rows, heads, dim, tokens)
    stored_q, stored_keys = _stored(q), _stored(keys)
    # Codes that are NaN where no row may look.
    beyond = torch.arange(tokens) >= visible.amax(dim=1, keepdim=True)
    stored_keys[0].masked_fill_(beyond.unsqueeze(-1), 127)
    placed = [tuple(backend.place(part) for part in pair) for pair in (stored_q, stored_keys)]
    found = select_tokens_fp8(
        placed[0], backend.place(weights), placed[1], backend.place(visible), top_k,
        implementation=backend.implementation,
    )  # fmt: skip
    expected = select_tokens_fp8_reference(stored_q, weights, stored_keys, visible, top_k)
    assert torch.equal(found.cpu(), expected)


def test_every_e4m3_code_and_scale_is_decoded(backend: Backend) -> None:
    """One dimension, one head: the score is the decoded key itself, so the order is the codes'."""
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    keys = codes.view(1, -1, 1)
    scales = torch.full_like(keys, 120)
    one = torch.full((1, 1, 1, 1), 56, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() * 2.0**-7
    for top_k in (1, 50, 126):
        found = select_tokens_fp8(
            (backend.place(one), backend.place(torch.full_like(one, 127))),
            backend.place(torch.ones(1, 1, 1)),
            (backend.place(keys), backend.place(scales)),
            backend.place(torch.tensor([[len(codes)]])),
            top_k,
            implementation=backend.implementation,
        )
        best = sorted(range(len(codes)), key=lambda j: (-max(float(values[j]), 0.0), j))[:top_k]
        assert found.flatten().tolist() == sorted(best)


def _angles(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angle = 3 * _random(tokens, half, seed=6)
    return angle.cos(), angle.sin()


# tokens, heads, dim, rotated half, precision
VECTORS = [
    pytest.param(1, 1, 2, 1, Precision.EXACT, id="one pair"),
    pytest.param(5, 3, 11, 2, Precision.EXACT, id="prime sizes, a part that does not turn"),
    pytest.param(19, 2, 24, 12, Precision.EXACT, id="every dim turns, rows beyond a tile"),
    pytest.param(3, 2, 5, 0, Precision.EXACT, id="no rotation"),
    pytest.param(0, 2, 8, 2, Precision.EXACT, id="no tokens"),
    pytest.param(3, 2, 2, 1, Precision.FP8, id="two dims in fp8"),
    pytest.param(17, 1, 16, 4, Precision.FP8, id="fp8, rows beyond a tile"),
    pytest.param(2, 2, 128, 32, Precision.FP8, id="fp8, the published sizes"),
    pytest.param(1, 2, 256, 8, Precision.FP8, id="two scales per vector"),
    pytest.param(0, 2, 8, 2, Precision.FP8, id="no tokens in fp8"),
]


def _sized(x: Tensor) -> Tensor:
    """Vectors whose sizes differ by powers of two, one of them smaller than any scale."""
    return x * 2.0 ** torch.arange(-20, 20, 5).repeat(x.numel() + 1)[: x[..., 0].numel()].view(
        *x.shape[:-1], 1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim", "half", "precision"), VECTORS)
def test_index_vectors(
    tokens: int, heads: int, dim: int, half: int, precision: Precision,
    dtype: torch.dtype, backend: Backend,
) -> None:  # fmt: skip
    """In fp16 as in fp32: what is rounded on the way is rounded in the same places."""
    q = _random(tokens, heads, dim).to(dtype)
    k = (_random(tokens, dim, seed=1) + 2).to(dtype)
    q, k = (_sized(q), k) if dtype == torch.float32 else (q, k)
    weight, bias = 1 + _random(dim, seed=2), _random(dim, seed=3)
    angles = _angles(tokens, half)
    placed = [backend.place(x) for x in angles]
    found_q = index_query(
        backend.place(q), *placed, precision, implementation=backend.implementation
    )
    norm = [backend.place(x) for x in (weight, bias)]
    found_k = index_key(
        backend.place(k), *norm, *placed, precision, implementation=backend.implementation
    )
    loose = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-6}
    for found, expected in (
        (found_q, index_query_reference(q, *angles, precision)),
        (found_k, index_key_reference(k, weight, bias, *angles, precision)),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu().float(), expected, **loose)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 8)}, r"q: expected float \[tokens, heads, dim\], found .* \[2, 8\]"),
        ({"q": torch.zeros(2, 3, 8).int()}, "q: expected float"),
        (
            {"cos": torch.zeros(2, 5)},
            r"cos: expected \[2, half\] with half at most 4, found",
        ),
        ({"cos": torch.zeros(3, 2)}, r"cos: expected \[2, half\]"),
        ({"sin": torch.zeros(2, 1)}, r"sin: expected \[2, 2\] as cos, found \[2, 1\]"),
        ({"q": torch.zeros(2, 3, 12)}, "q: expected a power of two as dim for fp8, found 12"),
    ],
)
def test_index_vectors_refuse(change: dict[str, Tensor], message: str) -> None:
    given = {"q": torch.zeros(2, 3, 8), "cos": torch.zeros(2, 2), "sin": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=message):
        index_query(**(given | change), precision=Precision.FP8)
    with pytest.raises(ValueError, match=r"bias: expected \[8\], found \[7\]"):
        index_key(given["q"][:, 0], torch.ones(8), torch.ones(7), given["cos"], given["sin"])


@pytest.mark.skipif(not INTERPRETED, reason="the chunks of the Triton path")
def test_indexer_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.kernels import ordered

    monkeypatch.setattr(ordered, "CHUNK_ELEMENTS", 2 * 11 * 3)
    inputs = _index_inputs(2, 8, 2, 3, 11)
    found = select_tokens(*inputs, 4, implementation="triton")
    assert torch.equal(found, select_tokens_reference(*inputs, 4))


def test_other_storage_is_refused_by_name() -> None:
    q, weights, keys, visible = _index_inputs(2, 3, 2, 5, 9)
    stored_q, stored_keys = _stored(q), _stored(keys)
    short = (stored_keys[0], stored_keys[1].squeeze(-1))
    with pytest.raises(ValueError, match=r"scales of keys: expected \[2, 9, 1\], found \[2, 9\]"):
        select_tokens_fp8(stored_q, weights, short, visible, 4)
    with pytest.raises(ValueError, match=r"q: expected uint8 or .*e4m3fn, found torch.int32"):
        select_tokens_fp8((stored_q[0].int(), stored_q[1]), weights, stored_keys, visible, 4)
