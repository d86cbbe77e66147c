"""Top-k and top-p masks against SGLang's own sampler, and sampled verification through SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_trees import DraftTree, stacked_links
from scipy.stats import chisquare

from sglang_ext.srt.sgl_kernel_torch.filters import keep_top_k, keep_top_p

VOCAB = 7
TREE = DraftTree((-1, 0, 0, 1))
LOGITS = 0.6 * torch.randn(TREE.nodes, VOCAB, generator=torch.Generator().manual_seed(3))
# The drafts are the likeliest tokens, so that every filter keeps some of them.
TOKENS = [0, *LOGITS[0].topk(2).indices.tolist(), int(LOGITS[1].argmax())]


def sampler_filter(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution that SGLang's PyTorch sampler draws from; probs [vocab]."""
    order = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    kept, in_front = torch.zeros_like(probs), 0.0
    for rank, token in enumerate(order):
        if rank < top_k and in_front <= top_p:
            kept[token] = probs[token]
        in_front += float(probs[token])
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_masks_one_after_the_other_are_the_samplers(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(6, VOCAB, generator=generator).softmax(-1)
    top_ks = torch.tensor([1, 2, 3, 5, VOCAB, 1 << 30])
    top_ps = torch.tensor([1.0, 0.6, 0.5, 0.9, 0.01, 0.75])
    actual = keep_top_p(keep_top_k(probs, top_ks), top_ps)
    for row in range(6):
        expected = sampler_filter(probs[row], int(top_ks[row]), float(top_ps[row]))
        torch.testing.assert_close(actual[row], expected)


def test_masks_leave_their_input_alone() -> None:
    probs = torch.rand(2, VOCAB)
    before = probs.clone()
    keep_top_p(keep_top_k(probs, torch.tensor([2, 2])), torch.tensor([0.5, 0.5]))
    assert torch.equal(probs, before)


@pytest.fixture
def eagle_utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module with the patch in force and the process-wide settings it reads faked."""
    from sglang.srt import runtime_context
    from sglang.srt.layers import dp_attention
    from sglang.srt.speculative import eagle_utils

    from sglang_ext.patches import eagle_sampling

    for name in (
        "_verify_uses_greedy",
        "tree_speculative_sampling_target_only",
        "top_k_renorm_prob",
        "top_p_renorm_prob",
    ):
        monkeypatch.setattr(eagle_utils, name, getattr(eagle_utils, name))
    original = eagle_utils._verify_uses_greedy
    monkeypatch.setattr(eagle_sampling, "hook", lambda *_: None)
    eagle_sampling.PATCH.apply()
    eagle_utils._verify_uses_greedy = lambda **question: eagle_sampling._greedy_only_if_all_are(
        original, **question
    )
    settings = SimpleNamespace(
        speculative_use_rejection_sampling=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )
    monkeypatch.setattr(eagle_utils, "get_spec", lambda: settings)
    alone = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: alone)
    monkeypatch.setattr(dp_attention, "is_dp_attention_enabled", lambda: False)
    return eagle_utils


def verify(
    eagle_utils: Any, logits: torch.Tensor, draws: int, **sampling: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """First tokens [draws] and accept lengths [draws] of `draws` equal requests."""
    nodes = len(TOKENS)
    index, first, sibling = stacked_links([TREE] * draws)
    info = SimpleNamespace(
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        is_all_greedy=False,
        temperatures=torch.ones(draws, 1),
        sampling_seed=torch.arange(draws),
    )
    vars(info).update(sampling)
    batch = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=torch.full((draws,), 9),
        sampling_info=info,
        return_logprob=False,
    )
    tree = SimpleNamespace(
        draft_token=torch.tensor(TOKENS).repeat(draws),
        draft_token_num=nodes,
        max_tree_depth=3,
        tree_topk=2,
        draft_probs=None,
        retrieve_index=index,
        retrieve_next_token=first,
        retrieve_next_sibling=sibling,
    )
    output = SimpleNamespace(next_token_logits=logits.repeat(draws, 1))
    predict, lengths, accepted = eagle_utils.eagle_sample(tree, batch, output)
    return predict[accepted[:, 0].long()].long(), lengths


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(None, None, 1.0), (3, None, 0.7), (None, 0.8, 1.6), (4, 0.6, 1.0)],
)
def test_sampled_verification_has_the_samplers_distribution(
    eagle_utils: Any, top_k: int | None, top_p: float | None, temperature: float
) -> None:
    draws = 20_000
    tokens, lengths = verify(
        eagle_utils,
        LOGITS,
        draws,
        temperatures=torch.full((draws, 1), temperature),
        need_top_k_sampling=top_k is not None,
        top_ks=torch.full((draws,), top_k or 1),
        need_top_p_sampling=top_p is not None,
        top_ps=torch.full((draws,), top_p or 1.0),
    )
    probs = (LOGITS[0] / temperature).softmax(-1)
    expected = sampler_filter(probs, top_k or VOCAB, 1.0 if top_p is None else top_p).double()
    observed = torch.bincount(tokens, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    live = expected > 0
    scaled = expected[live] / expected.sum() * draws
    assert chisquare(observed[live].numpy(), scaled.numpy()).pvalue > 1e-3
    assert set(lengths.tolist()) == {1, 2, 3}


def test_batch_of_greedy_requests_still_takes_the_greedy_walk(eagle_utils: Any) -> None:
    tokens, _ = verify(eagle_utils, LOGITS, 3, is_all_greedy=True)
    assert tokens.tolist() == [int(LOGITS[0].argmax())] * 3
