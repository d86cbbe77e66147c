"""Attention over latents against loops, and its two forms against each other."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.mla import UpProjection
from sglang_ext.kernels.latent_attention import attend_expanded, attend_visible
from sglang_ext.kernels.latent_attention.reference import (
    attend_expanded_reference,
    attend_visible_reference,
)

# (batch, rows, heads, latent, rope, tokens)
SHAPES = {
    "one of everything": (1, 1, 1, 1, 2, 1),
    "prime sizes": (3, 5, 7, 11, 2, 13),
    "no rotary part": (2, 3, 2, 8, 0, 9),
    "wide": (2, 4, 3, 32, 8, 40),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_visible_equals_reference(shape: tuple[int, ...]) -> None:
    batch, rows, heads, latent, rope, tokens = shape
    torch.manual_seed(0)
    q = torch.randn(batch, rows, heads, latent + rope)
    visible = torch.randint(0, tokens + 1, (batch, rows))
    cached = torch.randn(batch, tokens, latent + rope)
    # Slots past the end of a request belong to others and may hold anything.
    beyond = torch.arange(tokens) >= visible.amax(dim=1, keepdim=True)
    cached = cached.masked_fill(beyond.unsqueeze(-1), float("nan"))
    found = attend_visible(q, cached, visible, latent, 0.3)
    expected = attend_visible_reference(q, cached, visible, latent, 0.3)
    assert torch.allclose(found, expected, atol=1e-5)


def test_rows_that_see_nothing_are_zero() -> None:
    out = attend_visible(
        torch.randn(2, 3, 2, 6), torch.full((2, 4, 6), float("nan")), torch.zeros(2, 3).long(), 4, 1
    )
    assert torch.equal(out, torch.zeros(2, 3, 2, 4))


@pytest.mark.parametrize("first", [0, 1, 7])
def test_expanded_equals_reference(first: int) -> None:
    torch.manual_seed(1)
    rows, heads, dim, value = 5, 3, 11, 7
    q = torch.randn(rows, heads, dim)
    keys, values = torch.randn(first + rows, heads, dim), torch.randn(first + rows, heads, value)
    found = attend_expanded(q, keys, values, first, 0.2)
    expected = attend_expanded_reference(q, keys, values, first, 0.2)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("first", [0, 4])
def test_absorbed_and_expanded_agree(first: int) -> None:
    """The same sum by either way, with keys and values of unequal width."""
    torch.manual_seed(2)
    heads, nope, rope, value, latent, rows = 3, 5, 4, 7, 16, 6
    up = UpProjection(torch.randn(heads * (nope + value), latent) / 4, nope, value)
    cached, q = torch.randn(first + rows, latent + rope), torch.randn(rows, heads, nope + rope)
    keys, values = up.expand(cached)
    expanded = attend_expanded(q, keys, values, first, 0.3)
    visible = torch.arange(first, first + rows)[None] + 1
    out = attend_visible(up.absorb(q)[None], cached[None], visible, latent, 0.3)
    assert torch.allclose(up.values(out[0]), expanded, atol=1e-5)


def test_expanding_pays_for_many_rows_only() -> None:
    up = UpProjection(torch.empty(128 * 256, 512, device="meta"), 128, 128)
    assert not up.expanding_pays(1, 2048, 64)
    assert up.expanding_pays(2048, 2048, 64)


def test_contradictions_are_named() -> None:
    with pytest.raises(ValueError, match=r"latents: expected \[1, 3, 6\], found \[1, 3, 5\]"):
        attend_visible(torch.zeros(1, 2, 2, 6), torch.zeros(1, 3, 5), torch.ones(1, 2).long(), 4, 1)
    with pytest.raises(ValueError, match=r"keys: expected \[5, 2, 6\], found \[4, 2, 6\]"):
        attend_expanded(torch.zeros(2, 2, 6), torch.zeros(4, 2, 6), torch.zeros(4, 2, 3), 3, 1)
