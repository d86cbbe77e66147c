"""The serial heads against the paper's formulas, one request and one step at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_ext.core.spec.confidence import ConfidenceHead
from sglang_ext.core.spec.markov import (
    DraftSampling,
    MarkovHead,
    build_markov_head,
    draft_target_ids,
    propose,
)

V, D, RANK, GAMMA = 31, 13, 5, 7
KINDS = ["vanilla", "gated", "rnn"]
# Draft ids 0..8 stand for these target ids.
D2T = torch.tensor([1, 3, 4, 9, 11, 17, 20, 21, 30]) - torch.arange(9)


def build(kind: str, draft_vocab: int | None = None, seed: int = 0) -> MarkovHead:
    torch.manual_seed(seed)
    head = build_markov_head(
        kind, vocab_size=V, rank=RANK, hidden_size=D, draft_vocab_size=draft_vocab
    )
    return head.double().requires_grad_(False)


def inputs(requests: int, columns: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, GAMMA, columns, generator=generator)
    hidden = torch.randn(requests, GAMMA, D, generator=generator, dtype=torch.float64)
    return logits, hidden, torch.randint(0, V, (requests,), generator=generator)


def naive_bias(
    kind: str, head: MarkovHead, e: Tensor, h: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    weights = dict(head.named_parameters())
    w2 = weights["markov_w2.weight"]
    if kind == "vanilla":
        return w2 @ e, state
    if kind == "gated":
        z = torch.cat((h, e))
        gate = torch.sigmoid(weights["gate_proj.weight"] @ z + weights["gate_proj.bias"])
        return w2 @ (gate * e), state
    z = torch.cat((state, e, h))
    gate, cand, out = (weights["joint_proj.weight"] @ z + weights["joint_proj.bias"]).split(RANK)
    keep = torch.sigmoid(gate)
    return w2 @ torch.tanh(out), keep * state + (1 - keep) * torch.tanh(cand)


def naive_block(
    kind: str,
    head: MarkovHead,
    logits: Tensor,
    hidden: Tensor,
    anchor: int,
    coins: Tensor | None,
    temperature: float,
    ids: list[int],
) -> tuple[list[int], list[Tensor]]:
    """Tokens and laws of one request."""
    previous, state = anchor, torch.zeros(RANK, dtype=torch.float64)
    tokens, laws = [], []
    for k in range(GAMMA):
        bias, state = naive_bias(kind, head, head.markov_w1.weight[previous], hidden[k], state)
        law = torch.softmax((logits[k] + bias) / temperature, dim=-1)
        if coins is None:
            column = int(law.argmax())
        else:
            column, reached = 0, float(law[0])
            while reached <= float(coins[k]):
                column += 1
                reached += float(law[column])
        previous = ids[column]
        tokens.append(previous)
        laws.append(law)
    return tokens, laws


@pytest.mark.parametrize("reduced", [False, True], ids=["full-vocab", "d2t"])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_blocks_equal_the_formulas(kind: str, requests: int, reduced: bool) -> None:
    ids = draft_target_ids(D2T) if reduced else torch.arange(V)
    head = build(kind, len(ids))
    logits, hidden, anchors = inputs(requests, len(ids))
    got = propose(head, logits, hidden, anchors, target_ids=ids if reduced else None)
    assert got.probs is None
    for r in range(requests):
        expected, _ = naive_block(
            kind, head, logits[r], hidden[r], int(anchors[r]), None, 1.0, ids.tolist()
        )
        assert got.tokens[r].tolist() == expected


@pytest.mark.parametrize("reduced", [False, True], ids=["full-vocab", "d2t"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_blocks_equal_the_formulas_and_keep_their_law(kind: str, reduced: bool) -> None:
    ids = draft_target_ids(D2T) if reduced else torch.arange(V)
    head, temperatures = build(kind, len(ids)), [0.5, 1.0, 1.7]
    logits, hidden, anchors = inputs(3, len(ids))
    coins = torch.rand(3, GAMMA, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inverse = 1 / torch.tensor(temperatures)[:, None]
    got = propose(
        head,
        logits,
        hidden,
        anchors,
        sampling=DraftSampling(inverse, coins),
        target_ids=ids if reduced else None,
    )
    assert got.probs is not None
    for r, temperature in enumerate(temperatures):
        tokens, laws = naive_block(
            kind, head, logits[r], hidden[r], int(anchors[r]), coins[r], temperature, ids.tolist()
        )
        assert got.tokens[r].tolist() == tokens
        torch.testing.assert_close(got.probs[r].double(), torch.stack(laws), atol=1e-6, rtol=1e-5)
    if reduced:
        assert got.support is not None
        assert got.columns is not None
        assert torch.equal(got.support[got.columns], got.tokens)
    else:
        assert got.support is None


def test_the_bias_applies_at_the_first_position() -> None:
    head = build("vanilla")
    logits, hidden, _ = inputs(1, V)
    first = {
        int(propose(head, 0 * logits, hidden, torch.tensor([a])).tokens[0, 0]) for a in range(V)
    }
    assert len(first) > 1


def test_fixed_requests_are_drawn_by_the_sampler_and_the_rest_by_coin() -> None:
    head = build("vanilla")
    logits, hidden, anchors = inputs(3, V)
    coins = torch.rand(3, GAMMA, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fixed, ones = torch.tensor([False, True, False]), torch.ones(3, 1)
    steps: list[int] = []

    def last(scores: Tensor, k: int) -> Tensor:
        steps.append(k)
        return torch.full((3,), V - 1)

    mixed = propose(head, logits, hidden, anchors, sampling=DraftSampling(ones, coins, fixed, last))
    by_coin = propose(head, logits, hidden, anchors, sampling=DraftSampling(ones, coins))
    assert mixed.tokens[1].tolist() == [V - 1] * GAMMA
    assert torch.equal(mixed.tokens[[0, 2]], by_coin.tokens[[0, 2]])
    assert steps == list(range(GAMMA))


def test_a_fixed_request_without_a_sampler_is_greedy() -> None:
    head = build("rnn")
    logits, hidden, anchors = inputs(2, V)
    rule = DraftSampling(torch.ones(2, 1), torch.zeros(2, GAMMA), torch.tensor([True, True]))
    sampled = propose(head, logits, hidden, anchors, sampling=rule)
    assert torch.equal(sampled.tokens, propose(head, logits, hidden, anchors).tokens)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_the_previous_token_never_its_own(with_markov: bool) -> None:
    head = build("vanilla")
    torch.manual_seed(3)
    confidence = ConfidenceHead(D, RANK if with_markov else 0).double().requires_grad_(False)
    logits, hidden, anchors = inputs(2, V)
    got = propose(head, logits, hidden, anchors, confidence=confidence)
    weight, bias = confidence.proj.weight[0], confidence.proj.bias
    assert got.confidence is not None
    for r in range(2):
        previous = [int(anchors[r]), *got.tokens[r, :-1].tolist()]
        for k in range(GAMMA):
            expected = weight[:D] @ hidden[r, k] + bias[0]
            if with_markov:
                expected = expected + weight[D:] @ head.markov_w1.weight[previous[k]]
            assert float(got.confidence[r, k]) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("gamma", [1, 2, 3, 8])
def test_confidence_follows_the_gamma_of_the_run_not_of_the_checkpoint(gamma: int) -> None:
    head = build("gated")
    hidden = torch.randn(2, gamma, D, dtype=torch.float64)
    got = propose(
        head,
        torch.randn(2, gamma, V),
        hidden,
        torch.tensor([1, 2]),
        confidence=ConfidenceHead(D, RANK).double(),
    )
    assert got.confidence is not None
    assert got.confidence.shape == got.tokens.shape == (2, gamma)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_do_not_see_each_other(kind: str) -> None:
    head = build(kind)
    logits, hidden, anchors = inputs(4, V)
    together = propose(head, logits, hidden, anchors).tokens
    for r in range(4):
        alone = propose(head, logits[r : r + 1], hidden[r : r + 1], anchors[r : r + 1]).tokens
        assert torch.equal(alone[0], together[r])


def test_half_precision_weights_draft_from_fp32_logits() -> None:
    head = build("gated").bfloat16()
    logits, hidden, anchors = inputs(2, V)
    rule = DraftSampling(torch.ones(2, 1), torch.full((2, GAMMA), 0.3))
    got = propose(head, logits.bfloat16(), hidden.bfloat16(), anchors, sampling=rule)
    assert got.probs is not None
    torch.testing.assert_close(got.probs.sum(-1), torch.ones(2, GAMMA))


def test_checkpoint_names_and_shapes() -> None:
    shapes = {k: tuple(v.shape) for k, v in build("rnn", 9).state_dict().items()}
    assert shapes == {
        "markov_w1.weight": (V, RANK),
        "markov_w2.weight": (9, RANK),
        "joint_proj.weight": (3 * RANK, 2 * RANK + D),
        "joint_proj.bias": (3 * RANK,),
    }
    assert build("gated").state_dict()["gate_proj.weight"].shape == (RANK, D + RANK)


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"markov_head_type.*'lstm'"):
        build("lstm")
