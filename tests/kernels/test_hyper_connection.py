"""Hyper-connections: by hand, by closed form, and against the naive reference."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.hyper_connection import sinkhorn
from sglang_ext.kernels.hyper_connection import hc_head, hc_post, hc_pre
from sglang_ext.kernels.hyper_connection.reference import (
    hc_head_reference,
    hc_post_reference,
    hc_pre_reference,
)
from tests.kernels.backend import Backend

pytestmark = pytest.mark.usefixtures("poisoned")

# Far larger than in a model, so that a missing one shows.
EPS = {"eps": 3e-3, "rms_eps": 1e-2}
# (tokens, streams, width) and why.
SHAPES = {
    "one token": (1, 4, 64),
    "prime width, below a tile": (5, 4, 67),
    "width beyond a tile": (3, 4, 521),
    "tokens beyond a tile": (17, 4, 31),
    "two streams": (2, 2, 13),
    "no tokens": (0, 4, 16),
}


def _inputs(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens, n, width = shape
    generator = torch.Generator().manual_seed(tokens * 1000 + width)
    outs = n * (2 + n)
    return {
        "streams": torch.randn(shape, generator=generator).to(dtype),
        "fn": torch.randn(outs, n * width, generator=generator) / (n * width) ** 0.5,
        "base": torch.randn(outs, generator=generator),
        "scale": 0.5 + torch.rand(3, generator=generator),
    }


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1 / 128
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_pre_and_post_equal_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, backend: Backend
) -> None:
    plain = _inputs(shape, dtype)
    inputs = {name: backend.place(x) for name, x in plain.items()}
    found = hc_pre(**inputs, iters=20, **EPS, implementation=backend.implementation)
    expected = hc_pre_reference(**plain, iters=20, **EPS)
    assert found.x.dtype == dtype
    assert found.post.dtype == found.comb.dtype == torch.float32
    _close(found.x, expected.x, dtype)
    for name in ("post", "comb"):
        torch.testing.assert_close(
            getattr(found, name).cpu(), getattr(expected, name), rtol=2e-5, atol=2e-6
        )
    y = torch.randn(shape[0], shape[2], generator=torch.Generator().manual_seed(1)).to(dtype)
    after = hc_post(
        backend.place(y), inputs["streams"], found.post, found.comb,
        implementation=backend.implementation,
    )  # fmt: skip
    assert after.dtype == dtype
    by_loop = hc_post_reference(y, plain["streams"], expected.post, expected.comb)
    _close(after, by_loop, dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_head_equals_the_reference(shape: tuple[int, int, int], backend: Backend) -> None:
    plain = _inputs(shape, torch.float32)
    n = shape[1]
    plain |= {"fn": plain["fn"][:n], "base": plain["base"][:n], "scale": plain["scale"][:1]}
    inputs = {name: backend.place(x) for name, x in plain.items()}
    found = hc_head(**inputs, **EPS, implementation=backend.implementation)
    _close(found, hc_head_reference(**plain, **EPS), torch.float32)


def test_post_by_hand(backend: Backend) -> None:
    """X'_0 = .5 * 10 + 1 * 1 + 3 * 2 = 12 and X'_1 = 2 * 10 + 2 * 1 + 4 * 2 = 30.

    comb is not symmetric: taken the wrong way round it gives 10 and 31.
    """
    y, streams = torch.tensor([[10.0]]), torch.tensor([[[1.0], [2.0]]])
    post, comb = torch.tensor([[0.5, 2.0]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    placed = [backend.place(x) for x in (y, streams, post, comb)]
    found = hc_post(*placed, implementation=backend.implementation)
    assert found.flatten().tolist() == [12.0, 30.0]
    placed[3] = backend.place(comb.transpose(1, 2))
    wrong = hc_post(*placed, implementation=backend.implementation)
    assert wrong.flatten().tolist() == [10.0, 31.0]


def test_a_token_does_not_depend_on_its_neighbours(backend: Backend) -> None:
    inputs = {n: backend.place(x) for n, x in _inputs((19, 4, 96), torch.float32).items()}
    options = {"iters": 20, **EPS, "implementation": backend.implementation}
    together = hc_pre(**inputs, **options)
    streams = inputs.pop("streams")
    alone = [hc_pre(streams[t : t + 1], **inputs, **options) for t in (0, 7, 18)]
    # Triton sums in an order that does not depend on the number of tokens; a BLAS may not.
    limits = (0, 0) if backend.implementation == "triton" else (1e-5, 1e-6)
    for t, mix in zip((0, 7, 18), alone, strict=True):
        for found, expected in zip(mix, (x[t : t + 1] for x in together), strict=True):
            torch.testing.assert_close(found, expected, rtol=limits[0], atol=limits[1])


def test_sinkhorn_sums() -> None:
    logits = 3 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    matrix = sinkhorn(logits, 20, 1e-6)
    ones = torch.ones(50, 4)
    torch.testing.assert_close(matrix.sum(-2), ones, rtol=0, atol=1e-5)
    torch.testing.assert_close(matrix.sum(-1), ones, rtol=0, atol=5e-2)
    rows = [(sinkhorn(logits, i, 1e-6).sum(-1) - 1).abs().max() for i in (1, 5, 20)]
    assert rows[0] > rows[1] > rows[2]
    assert (matrix > 0).all()


def test_sinkhorn_of_two_by_two_has_a_closed_form() -> None:
    """The limit is [[p, 1-p], [1-p, p]] with p / (1 - p) = sqrt(a d / (b c))."""
    logits = torch.randn(20, 2, 2, generator=torch.Generator().manual_seed(0))
    odds = torch.exp((logits[:, 0, 0] + logits[:, 1, 1] - logits[:, 0, 1] - logits[:, 1, 0]) / 2)
    p = odds / (1 + odds)
    matrix = sinkhorn(logits, 200, 0.0)
    torch.testing.assert_close(matrix[:, 0, 0], p, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrix[:, 0, 1], 1 - p, rtol=1e-4, atol=1e-5)


def test_one_iteration_ends_on_columns() -> None:
    """One iteration of [[0, ln 3], [0, 0]]: rows .25 .75 and .5 .5, columns then .75 and 1.25."""
    logits = torch.tensor([[[0.0, 3.0], [1.0, 1.0]]])
    logits[0, 0, 1] = torch.log(torch.tensor(3.0))
    expected = torch.tensor([[[0.25 / 0.75, 0.75 / 1.25], [0.5 / 0.75, 0.5 / 1.25]]])
    torch.testing.assert_close(sinkhorn(logits, 1, 0.0), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fn": torch.zeros(24, 255)}, r"fn: expected torch.float32 \[24, 256\], found .*255"),
        ({"base": torch.zeros(24, dtype=torch.bfloat16)}, "base: expected torch.float32"),
        ({"scale": torch.zeros(1)}, r"scale: expected torch.float32 \[3\]"),
        ({"iters": 0}, "iters: expected at least 1, found 0"),
        ({"implementation": "cuda"}, "implementation: expected one of auto, torch, triton"),
    ],
)
def test_pre_refuses(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {**_inputs((2, 4, 64), torch.float32), "iters": 20, **EPS}
    with pytest.raises(ValueError, match=message):
        hc_pre(**{**arguments, **change})  # type: ignore[arg-type]


def test_three_streams_run_in_torch_and_are_refused_by_name() -> None:
    inputs = _inputs((2, 3, 16), torch.float32)
    expected = hc_pre_reference(**inputs, iters=3, **EPS)
    torch.testing.assert_close(hc_pre(**inputs, iters=3, **EPS).x, expected.x, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="expected a power of two of streams"):
        hc_pre(**inputs, iters=3, **EPS, implementation="triton")
