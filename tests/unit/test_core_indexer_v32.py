"""The pure parts of DeepSeek-V3.2's indexer: rotation, Hadamard turn, rounding, choice."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.indexer_v32 import (
    Precision,
    choose,
    hadamard,
    head_weights,
    index_key,
    index_query,
    index_scores,
    positions_of,
    rotate_first,
    rounded,
)


def _angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(tokens, half)
    return angle.cos(), angle.sin()


def test_rotation_takes_the_first_dims_and_pairs_halves() -> None:
    """Worked by hand: a quarter turn sends (a, b) to (-b, a) for the pair (0, 2) and (1, 3)."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert rotate_first(x, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]]]


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_hadamard_is_orthonormal_and_its_own_inverse(width: int) -> None:
    matrix = hadamard(torch.eye(width))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(width), atol=1e-6)
    assert torch.allclose(hadamard(matrix), torch.eye(width), atol=1e-6)
    assert torch.allclose(matrix.abs(), torch.full((width, width), width**-0.5))


def test_hadamard_refuses_another_width() -> None:
    with pytest.raises(ValueError, match="power of two as last axis, found 12"):
        hadamard(torch.zeros(3, 12))


def test_hadamard_on_both_sides_keeps_every_score_and_on_one_does_not() -> None:
    torch.manual_seed(0)
    q, k, w = torch.randn(1, 3, 4, 16), torch.randn(1, 20, 16), torch.randn(1, 3, 4)
    plain = index_scores(q, w, k)
    assert torch.allclose(index_scores(hadamard(q), w, hadamard(k)), plain, atol=1e-5)
    assert not torch.allclose(index_scores(hadamard(q), w, k), plain, atol=0.1)


def test_scores_by_hand() -> None:
    """Two heads, one of them below zero: 0.5 * ReLU(2 * 2^-1/2) + 3 * ReLU(-1 * 2^-1/2)."""
    q = torch.tensor([[[[2.0, 0.0], [0.0, -1.0]]]])
    scores = index_scores(q, torch.tensor([[[0.5, 3.0]]]), torch.tensor([[[1.0, 1.0]]]))
    assert scores.item() == pytest.approx(0.5 * 2 * 2**-0.5)


def test_head_weights_are_float32_over_the_root_of_the_heads() -> None:
    weights = head_weights(torch.ones(3, 16, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    assert torch.equal(weights, torch.full((3, 16), 0.25))


def test_key_norm_has_a_bias_and_centres() -> None:
    cos, sin = torch.ones(2, 2), torch.zeros(2, 2)
    k = torch.randn(2, 8) + 5
    found = index_key(k, torch.full((8,), 2.0), torch.arange(8.0), cos, sin)
    expected = (k - k.mean(-1, keepdim=True)) / (
        k.var(-1, unbiased=False, keepdim=True) + 1e-6
    ) ** 0.5
    assert torch.allclose(found, 2 * expected + torch.arange(8.0), atol=1e-5)


@pytest.mark.parametrize("dim", [16, 128, 256])
def test_fp8_values_fit_bfloat16_exactly_and_scales_are_powers_of_two(dim: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(7, 3, dim) * torch.logspace(-3, 3, 7).view(-1, 1, 1)
    found = rounded(x, Precision.FP8)
    assert torch.equal(found.bfloat16().float(), found)
    turned = hadamard(x)
    block = min(128, dim)
    error = (found - turned).abs().view(7, 3, -1, block).amax(-1)
    # Half a step of e4m3 at the block's largest value, whose scale may be rounded up by 2.
    assert bool((error <= turned.abs().view(7, 3, -1, block).amax(-1) / 16).all())
    assert rounded(x, Precision.EXACT) is x


def test_fp8_on_both_sides_stays_close() -> None:
    torch.manual_seed(2)
    cos, sin = _angles(30, 4)
    q, k = torch.randn(30, 8, 128), torch.randn(30, 128)
    one, zero = torch.ones(128), torch.zeros(128)
    weights = torch.rand(1, 30, 8)
    scores = [
        index_scores(
            index_query(q, cos, sin, p)[None], weights, index_key(k, one, zero, cos, sin, p)[None]
        )
        for p in Precision
    ]
    assert float((scores[0] - scores[1]).abs().mean()) < 0.05 * float(scores[0].std())


def test_choice_ignores_what_is_not_visible() -> None:
    scores = torch.tensor([[1.0, 2.0, float("nan"), 9.0], [5.0, 5.0, 5.0, 5.0]])
    found = choose(scores, torch.tensor([2, 3]), 2)
    assert found.tolist() == [[True, True, False, False], [True, True, False, False]]
    assert positions_of(found, 3).tolist() == [[0, 1, -1], [0, 1, -1]]
