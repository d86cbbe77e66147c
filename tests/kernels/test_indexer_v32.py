"""Selection of DeepSeek-V3.2's indexer against a loop and a plain sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.kernels.indexer_v32 import select_tokens, torch_select
from sglang_ext.kernels.indexer_v32.reference import select_tokens_reference

# (batch, rows, heads, dim, tokens, top_k): what each is there for.
SHAPES = {
    "one of everything": (1, 1, 1, 2, 1, 1),
    "fewer tokens than top_k": (2, 3, 4, 16, 5, 9),
    "as many tokens as top_k": (2, 3, 4, 16, 7, 7),
    "one more": (2, 3, 4, 16, 8, 7),
    "prime sizes": (3, 5, 7, 11, 31, 13),
    "the best one": (2, 4, 2, 8, 29, 1),
}


def _inputs(
    batch: int, rows: int, heads: int, dim: int, tokens: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, rows, heads, dim, generator=generator)
    weights = torch.randn(batch, rows, heads, generator=generator)
    keys = torch.randn(batch, tokens, dim, generator=generator)
    visible = torch.randint(0, tokens + 1, (batch, rows), generator=generator)
    return q, weights, keys, visible


def _poison(keys: Tensor, visible: Tensor) -> Tensor:
    """NaN in every token that no row of its request sees."""
    beyond = torch.arange(keys.shape[1]) >= visible.amax(dim=1, keepdim=True)
    return keys.masked_fill(beyond.unsqueeze(-1), float("nan"))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_equals_reference(shape: tuple[int, ...]) -> None:
    *sizes, top_k = shape
    for seed in range(5):
        q, weights, keys, visible = _inputs(*sizes, seed=seed)
        expected = select_tokens_reference(q, weights, keys, visible, top_k)
        found = select_tokens(q, weights, _poison(keys, visible), visible, top_k)
        assert torch.equal(found, expected)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, keys, visible = _inputs(2, 11, 3, 8, 40)
    whole = select_tokens(q, weights, keys, visible, 5)
    monkeypatch.setattr(torch_select, "CHUNK_ELEMENTS", 2 * 3 * 40 * 2)
    assert torch.equal(select_tokens(q, weights, keys, visible, 5), whole)


@given(
    scores=st.lists(st.integers(-2, 2), min_size=1, max_size=30),
    top_k=st.integers(1, 12),
    seen=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_the_earliest_of_equal_scores_wins(scores: list[int], top_k: int, seen: int) -> None:
    """Integer scores: the order is exact, and many are equal, zero above all."""
    seen = min(seen, len(scores))
    # One head, one dimension: a score is weight * ReLU(key), so the sign goes into the weight.
    keys = torch.tensor(scores).abs().float().view(1, -1, 1)
    positive = torch.tensor([s if s > 0 else 0 for s in scores])
    found = select_tokens(
        torch.ones(1, 1, 1, 1),
        torch.ones(1, 1, 1),
        keys * (torch.tensor(scores) > 0).view(1, -1, 1),
        torch.tensor([[seen]]),
        top_k,
    )[0, 0]
    order = sorted(range(seen), key=lambda j: (-int(positive[j]), j))[:top_k]
    assert found[found >= 0].tolist() == sorted(order)


def test_the_choice_does_not_depend_on_the_company() -> None:
    q, weights, keys, visible = _inputs(4, 3, 4, 16, 50)
    together = select_tokens(q, weights, keys, visible, 6)
    for b in range(4):
        for n in range(3):
            alone = select_tokens(
                q[b : b + 1, n : n + 1],
                weights[b : b + 1, n : n + 1],
                keys[b : b + 1],
                visible[b : b + 1, n : n + 1],
                6,
            )
            assert torch.equal(alone[0, 0], together[b, n])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("weights", lambda w: w[:, :, :1], ("weights", "[2, 3, 4]", "[2, 3, 1]")),
        ("weights", lambda w: w.double(), ("weights", "float32", "float64")),
        ("visible", lambda v: v[:, :2], ("visible", "[2, 3]", "[2, 2]")),
        ("keys", lambda k: k[..., :3], ("keys", "[2, 9, 16]", "[2, 9, 3]")),
        ("top_k", lambda _: 0, ("top_k", "at least 1", "0")),
    ],
)
def test_contradictions_are_named(name: str, change: object, words: tuple[str, ...]) -> None:
    q, weights, keys, visible = _inputs(2, 3, 4, 16, 9)
    arguments = {"weights": weights, "keys": keys, "visible": visible, "top_k": 4}
    arguments[name] = change(arguments[name])  # type: ignore[operator]
    with pytest.raises(ValueError, match="select_tokens") as raised:
        select_tokens(q, **arguments)
    assert all(word in str(raised.value) for word in words)
