"""Tree verification of the `sgl_kernel` stand-in: greedy by a walk, sampled by chi-square."""

from __future__ import annotations

import random

import pytest
import torch
from draft_trees import DraftTree, random_tree, stacked_links
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_ext.srt.sgl_kernel_torch.tree_sampling import tree_speculative_sampling_target_only
from sglang_ext.srt.sgl_kernel_torch.verify import verify_tree_greedy_cpu


def greedy_walk(tree: DraftTree, tokens: list[int], choices: list[int], levels: int) -> list[int]:
    """Accepted nodes, the root first."""
    path = [0]
    while len(path) < levels:
        found = [c for c in tree.children(path[-1]) if tokens[c] == choices[path[-1]]]
        if not found:
            break
        path.append(found[0])
    return path


@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 11),
    batch=st.integers(0, 5),
    levels=st.integers(1, 6),
    vocab=st.integers(1, 3),
)
@settings(deadline=None, max_examples=120)
def test_greedy_verify_follows_the_targets_choice(
    seed: int, nodes: int, batch: int, levels: int, vocab: int
) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, nodes) for _ in range(batch)]
    candidates = [[rng.randrange(vocab) for _ in range(nodes)] for _ in range(batch)]
    choices = [[rng.randrange(vocab) for _ in range(nodes)] for _ in range(batch)]
    index, first, sibling = (
        stacked_links(trees) if trees else [torch.empty(0, nodes, dtype=torch.int64)] * 3
    )
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((batch, levels), -1, dtype=torch.int32)
    accepted = torch.full((batch,), -5, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accepted,
        torch.tensor(candidates, dtype=torch.int64).view(batch, nodes),
        index,
        first,
        sibling,
        torch.tensor(choices, dtype=torch.int64).view(batch, nodes),
    )
    wanted = [-5] * (batch * nodes)
    for request in range(batch):
        path = greedy_walk(trees[request], candidates[request], choices[request], levels)
        rows = [request * nodes + node for node in path]
        assert accept_index[request].tolist() == rows + [-1] * (levels - len(path))
        assert int(accepted[request]) == len(path) - 1
        for node, row in zip(path, rows, strict=True):
            wanted[row] = choices[request][node]
    assert predicts.tolist() == wanted


def sample(
    tree: DraftTree,
    tokens: list[int],
    target: torch.Tensor,
    draws: int,
    levels: int,
    coins: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    **thresholds: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts [draws, levels] with -1 behind their end, and accepted counts [draws]."""
    nodes, vocab = target.shape
    index, first, sibling = stacked_links([tree] * draws)
    generator = torch.Generator().manual_seed(7)
    predicts = torch.full((draws * nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((draws, levels), -1, dtype=torch.int32)
    accepted = torch.zeros(draws, dtype=torch.int32)
    tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        accepted,
        torch.tensor(tokens).expand(draws, nodes).contiguous(),
        index,
        first,
        sibling,
        torch.rand(draws, nodes, generator=generator) if coins is None else coins,
        torch.rand(draws, generator=generator) if last is None else last,
        target.expand(draws, nodes, vocab).contiguous(),
        torch.zeros(draws, nodes, vocab),
        **thresholds,
    )
    texts = torch.where(accept_index >= 0, predicts[accept_index.clamp(min=0)], -1)
    return texts, accepted


def text_probability(
    text: tuple[int, ...], tree: DraftTree, tokens: list[int], target: torch.Tensor
) -> float:
    """Probability that the target itself writes `text`, where the tree carries its states."""
    node, probability = 0, 1.0
    for token in text:
        probability *= float(target[node, token])
        node = next((c for c in tree.children(node) if tokens[c] == token), -1)
    return probability


# Root with three children, the first with two of its own; tokens differ among siblings.
TREE = DraftTree((-1, 0, 0, 0, 1, 1))
TOKENS = [0, 2, 0, 3, 1, 4]
VOCAB = 5


def random_target(seed: int, vocab: int = VOCAB, nodes: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(nodes, vocab, generator=generator)).softmax(-1)


def fits(observed: torch.Tensor, probabilities: torch.Tensor) -> bool:
    wide = probabilities.double()
    expected = wide / wide.sum() * observed.sum()
    return bool(chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_first_token_is_distributed_as_the_targets(seed: int) -> None:
    draws = 50_000
    target = random_target(seed)
    texts, _ = sample(TREE, TOKENS, target, draws, levels=3)
    observed = torch.bincount(texts[:, 0].long(), minlength=VOCAB)
    assert fits(observed, target[0])


@pytest.mark.parametrize("seed", [4, 5])
def test_whole_text_is_distributed_as_the_targets(seed: int) -> None:
    draws = 50_000
    target = random_target(seed)
    texts, _ = sample(TREE, TOKENS, target, draws, levels=3)
    counts: dict[tuple[int, ...], int] = {}
    for row in texts.tolist():
        text = tuple(token for token in row if token >= 0)
        counts[text] = counts.get(text, 0) + 1
    expected = {text: text_probability(text, TREE, TOKENS, target) * draws for text in counts}
    assert sum(expected.values()) == pytest.approx(draws, rel=1e-3)
    common = [text for text in counts if expected[text] >= 5]
    observed = torch.tensor([counts[text] for text in common])
    assert fits(observed, torch.tensor([expected[text] for text in common]))


def test_path_that_fills_every_level_draws_its_last_token_from_the_target_itself() -> None:
    target = torch.zeros(6, VOCAB)
    target[0, TOKENS[1]] = 1.0
    target[1] = random_target(9)[1]
    draws = 20_000
    texts, accepted = sample(TREE, TOKENS, target, draws, levels=2)
    assert accepted.tolist() == [1] * draws
    observed = torch.bincount(texts[:, 1].long(), minlength=VOCAB)
    assert fits(observed, target[1])


def test_coins_of_zero_accept_nothing_that_has_no_probability() -> None:
    target = torch.zeros(6, VOCAB)
    target[:, 4] = 1.0
    texts, accepted = sample(
        TREE, TOKENS, target, 2, levels=3, coins=torch.zeros(2, 6), last=torch.zeros(2)
    )
    assert accepted.tolist() == [0, 0]
    assert texts[:, 0].tolist() == [4, 4]


def test_last_coin_close_to_one_stays_on_tokens_with_probability() -> None:
    target = torch.zeros(6, VOCAB)
    target[:, 1] = 0.3333333
    target[:, 3] = 0.3333333
    almost = torch.full((1,), 1.0 - 2**-24)
    texts, _ = sample(
        DraftTree((-1, 0, 1, 2, 3, 4)), [0] * 6, target, 1, 3, torch.ones(1, 6), almost
    )
    assert texts[0, 0].item() == 3


def test_single_threshold_accepts_a_probable_child_against_the_coin() -> None:
    target = torch.zeros(6, VOCAB)
    target[:, 2], target[:, 4] = 0.4, 0.6
    coins = torch.full((1, 6), 0.99)
    _, strict = sample(TREE, TOKENS, target, 1, levels=2, coins=coins)
    _, loose = sample(TREE, TOKENS, target, 1, levels=2, coins=coins, threshold_single=0.4)
    assert (strict.item(), loose.item()) == (0, 1)
