"""DFlash 2: block convolution and candidate selector against their definitions."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.core.spec.conv import BlockConv, block_conv, block_conv_reference
from sglang_ext.core.spec.markov import DraftSampling
from sglang_ext.core.spec.selector import CandidateSelector


@pytest.mark.parametrize(
    ("blocks", "rows", "hidden", "taps", "group"),
    [(3, 8, 48, 2, 16), (1, 7, 15, 3, 5), (2, 1, 4, 2, 4), (2, 2, 6, 4, 3), (2, 5, 6, 1, 2)],
    ids=["released", "odd", "one-row", "more-taps-than-rows", "no-neighbour"],
)
def test_the_convolution_equals_its_reference(
    blocks: int, rows: int, hidden: int, taps: int, group: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(blocks, rows, hidden)
    base, delta = torch.randn(taps, hidden), torch.randn(blocks, rows, taps, hidden // group)
    torch.testing.assert_close(block_conv(x, base, delta), block_conv_reference(x, base, delta))


def test_the_convolution_by_hand() -> None:
    # Two rows, two channels in one group, taps (1, 10) and (2, 20), deltas 0.5 on tap 1 of row 1.
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    base = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    delta = torch.tensor([[[[0.0], [0.0]], [[0.0], [0.5]]]])
    expected = torch.tensor([[[1.0, 4.0], [3.0 + 10.5, 8.0 + 41.0]]])
    torch.testing.assert_close(block_conv(x, base, delta), expected)


def test_blocks_do_not_leak_into_each_other_and_later_rows_not_into_earlier() -> None:
    torch.manual_seed(1)
    x, base, delta = torch.randn(2, 4, 6), torch.randn(2, 6), torch.randn(2, 4, 2, 3)
    changed = x.clone()
    changed[0] = float("nan")
    changed[1, 3] = float("nan")
    out = block_conv(changed, base, delta)
    torch.testing.assert_close(out[1, :3], block_conv(x, base, delta)[1, :3])


def test_a_fresh_module_is_the_identity_apart_from_its_projection() -> None:
    conv = BlockConv(12, 2, 4).requires_grad_(False)
    conv.kernel_projection.weight.zero_()
    x = torch.randn(2, 5, 12)
    mixed, delta = conv.before(x)
    assert torch.equal(mixed, x)
    assert torch.equal(conv.after(x, delta), x)


def test_one_projection_of_the_input_gives_both_kernels() -> None:
    torch.manual_seed(2)
    conv = BlockConv(12, 3, 4).requires_grad_(False)
    conv.base_kernel.normal_()
    x, y = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    deltas = (x @ conv.kernel_projection.weight.T).view(2, 5, 2, 3, 3)
    mixed, delta = conv.before(x)
    torch.testing.assert_close(mixed, block_conv_reference(x, conv.base_kernel[0], deltas[:, :, 0]))
    torch.testing.assert_close(
        conv.after(y, delta), block_conv_reference(y, conv.base_kernel[1], deltas[:, :, 1])
    )


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"conv_group_size.*divisor of hidden_size 10.*found 4"):
        BlockConv(10, 2, 4)


VOCAB, RANK, HIDDEN, TOP_K, GAMMA = 37, 5, 11, 4, 7


def selector() -> CandidateSelector:
    torch.manual_seed(3)
    module = CandidateSelector(VOCAB, RANK, HIDDEN, TOP_K).requires_grad_(False)
    module.predecessor_codebook.normal_()
    module.successor_codebook.normal_()
    return module


@pytest.mark.parametrize("sampled", [False, True])
def test_the_walk_equals_the_score_of_its_definition(sampled: bool) -> None:
    module, requests = selector(), 3
    logits, hidden = torch.randn(requests, GAMMA, VOCAB), torch.randn(requests, GAMMA, HIDDEN)
    anchors = torch.randint(0, VOCAB, (requests,))
    temperature, coins = torch.tensor([[0.7], [1.0], [2.0]]), torch.rand(requests, GAMMA)
    rule = DraftSampling(1 / temperature, coins) if sampled else None
    values, ids = module.candidates(logits)
    got = module.walk(values, ids, hidden, anchors, rule)

    previous = anchors
    for k in range(GAMMA):
        scores = module.score_reference(logits[:, k], hidden[:, k], previous, ids[:, k])
        if rule is None:
            place = scores.argmax(-1)
        else:
            law = torch.softmax(scores / temperature, -1)
            place = (law.cumsum(-1) <= coins[:, k : k + 1]).sum(-1)
            assert got.probs is not None
            torch.testing.assert_close(got.probs[:, k], law)
        previous = ids[:, k].gather(1, place[:, None]).squeeze(1)
        assert torch.equal(got.tokens[:, k], previous)
    if sampled:
        assert got.columns is not None
        assert got.support is not None
        chosen = got.support.gather(2, got.columns[:, :, None]).squeeze(2)
        assert torch.equal(chosen, got.tokens)


def test_candidates_are_the_likeliest_tokens() -> None:
    logits = torch.randn(2, GAMMA, VOCAB)
    values, ids = selector().candidates(logits)
    assert torch.equal(values, logits.gather(2, ids))
    assert torch.equal(values, logits.sort(dim=-1, descending=True).values[..., :TOP_K])


def test_greedy_requests_in_a_sampled_batch_walk_as_when_alone() -> None:
    module = selector()
    logits, hidden = torch.randn(2, GAMMA, VOCAB), torch.randn(2, GAMMA, HIDDEN)
    anchors = torch.tensor([1, 2])
    values, ids = module.candidates(logits)
    rule = DraftSampling(torch.ones(2, 1), torch.rand(2, GAMMA), torch.tensor([False, True]))
    mixed = module.walk(values, ids, hidden, anchors, rule)
    greedy = module.walk(values, ids, hidden, anchors)
    assert torch.equal(mixed.tokens[1], greedy.tokens[1])
