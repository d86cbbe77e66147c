"""The draft against a naive loop, the losses against autograd, export and reading back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.core.spec import draft_config, draft_fields, draft_tensors
from sglang_ext.training.draft import Draft, DraftShape, Rope
from sglang_ext.training.evaluate import draft_tokens, play_rounds
from sglang_ext.training.export import checkpoint_tensors, export, read_shape
from sglang_ext.training.losses import (
    Labels,
    LossWeights,
    block_loss,
    competing_tokens,
    target_labels,
)
from sglang_ext.training.shards import Text
from sglang_ext.training.start import choose_vocabulary, fit_bigrams, fix_offsets

DSPARK = DraftShape(
    algorithm="DSPARK",
    hidden=32,
    intermediate=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    block_size=3,
    target_layer_ids=(0, 2),
    mask_token_id=3,
    vocab=50,
    draft_vocab=20,
    markov_rank=4,
    rope_theta=1e4,
    norm_eps=1e-5,
)
DFLASH = replace(DSPARK, algorithm="DFLASH", markov_rank=0)
ZLAB = replace(DFLASH, block_size=4, anchor_predicts=False)
TARGET_CONFIG = {"max_position_embeddings": 64, "num_hidden_layers": 5, "eos_token_id": 2}


def make(shape: DraftShape, seed: int = 0) -> Draft:
    torch.manual_seed(seed)
    d2t = torch.arange(20) // 3  # target ids increase, with gaps
    embedding, head = torch.randn(50, 32), torch.randn(20, 32)
    draft = Draft(shape, embedding=embedding, head=head, d2t=d2t, positions=64)
    for parameter in draft.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    if draft.markov_head is not None:
        torch.nn.init.normal_(draft.markov_head.second)
        torch.nn.init.normal_(draft.markov_head.markov_w1.weight)
    draft.feature_scale.uniform_(0.5, 2.0)
    return draft


def naive_block(draft: Draft, features: Tensor, anchor: int, token: int) -> Tensor:
    """One block, row by row and head by head: features [T, ids * hidden] -> [gamma, hidden]."""
    shape = draft.shape
    half, rows = shape.head_dim // 2, shape.layout.query_rows

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weight

    def rotate(x: Tensor, position: int) -> Tensor:
        angle = position * shape.rope_theta ** (-torch.arange(half) / half)
        a, b = x[:half], x[half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    fused = (features[:anchor] * draft.feature_scale) @ draft.fc.weight.T
    context = norm(fused, draft.hidden_norm.weight)
    x = draft.embedding[torch.tensor([token] + [shape.mask_token_id] * (rows - 1))]
    for layer in draft.layers:
        attention = layer.self_attn
        y = norm(x, layer.input_layernorm.weight)
        both = torch.cat([context, y])
        q = (y @ attention.q_proj.weight.T).view(rows, shape.heads, -1)
        k = (both @ attention.k_proj.weight.T).view(len(both), shape.kv_heads, -1)
        v = (both @ attention.v_proj.weight.T).view(len(both), shape.kv_heads, -1)
        out = torch.zeros(rows, shape.heads, shape.head_dim)
        for row in range(rows):
            for head in range(shape.heads):
                kv = head * shape.kv_heads // shape.heads
                query = rotate(norm(q[row, head], attention.q_norm.weight), anchor + row)
                keys = [
                    rotate(norm(k[i, kv], attention.k_norm.weight), i) for i in range(len(both))
                ]
                scores = torch.stack(keys) @ query * shape.head_dim**-0.5
                out[row, head] = scores.softmax(0) @ v[:, kv]
        x = x + out.flatten(1) @ attention.o_proj.weight.T
        y = norm(x, layer.post_attention_layernorm.weight)
        gate = F.silu(y @ layer.mlp.gate_proj.weight.T)
        x = x + (gate * (y @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return norm(x, draft.norm.weight)[shape.layout.first_predicting_row :]


@pytest.mark.parametrize("shape", [DSPARK, DFLASH, ZLAB], ids=["dspark", "dflash", "z-lab"])
@torch.no_grad()
def test_blocks_equal_the_naive_loop(shape: DraftShape) -> None:
    draft = make(shape)
    features = torch.randn(2, 11, 64)
    # 17 blocks: one more than share an attention call; anchors at both ends and twice the same.
    anchors = torch.randint(0, 11, (2, 17), generator=torch.Generator().manual_seed(2))
    anchors[0, :3] = torch.tensor([0, 10, 10])
    tokens = torch.randint(0, 50, (2, 17))
    found = draft.block_hidden(features, anchors, tokens)
    for text, block in ((0, 0), (0, 1), (0, 2), (0, 16), (1, 5), (1, 16)):
        anchor, token = int(anchors[text, block]), int(tokens[text, block])
        expected = naive_block(draft, features[text], anchor, token)
        torch.testing.assert_close(found[text, block], expected, rtol=1e-4, atol=1e-4)


def labels_of(rows: int, width: int, count: int) -> Labels:
    best, probability = target_labels(torch.randn(rows, width) * 2, count)
    token = torch.randint(-1, width, (rows,))
    return Labels(token, best, probability)


def test_the_loss_and_its_gradient_equal_autograds() -> None:
    torch.manual_seed(1)
    labels = labels_of(7, 23, 23)
    logits = torch.randn(7, 23, requires_grad=True)
    confidence = torch.randn(7, requires_grad=True)
    weight, weights = torch.rand(7), LossWeights()
    loss, _ = block_loss(logits, confidence, labels, weight, weights)
    found = torch.autograd.grad(loss, (logits, confidence))

    q = logits.softmax(-1)
    known = labels.token >= 0
    surprise = -q.log().gather(1, labels.token.clamp_min(0)[:, None]).squeeze(1) * known
    p = torch.zeros_like(q).scatter(1, labels.best, labels.probability)
    distance = 0.5 * (q - p).abs().sum(-1)  # the textbook form: `best` holds every token here
    accepted = (1 - distance).detach()
    bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    terms = 0.1 * surprise + 0.9 * distance + 1.0 * bce
    expected = (terms * weight).sum() / weight.sum()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(
        found, torch.autograd.grad(expected, (logits, confidence)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_competing_tokens_keep_every_label() -> None:
    labels = labels_of(9, 40, 5)
    subset, renumbered = competing_tokens(labels, 40, 3, torch.Generator().manual_seed(0))
    assert torch.equal(subset, subset.unique())
    assert torch.equal(subset[renumbered.best], labels.best)
    known = labels.token >= 0
    assert torch.equal(subset[renumbered.token[known]], labels.token[known])
    assert (renumbered.token[~known] == -1).all()


@pytest.mark.parametrize("shape", [DSPARK, DFLASH, ZLAB], ids=["dspark", "dflash", "z-lab"])
def test_an_exported_draft_is_what_the_workers_read(shape: DraftShape, tmp_path: Path) -> None:
    draft = make(shape)
    export(draft, TARGET_CONFIG, tmp_path)
    raw = draft_fields.read_config(tmp_path)
    facts = draft_config.TargetFacts(5, 32, 50, 1e4)
    config = draft_config.parse(raw, algorithm=shape.algorithm, target=facts)
    draft_tensors.check_tensors(config, draft_tensors.read_headers(tmp_path))
    assert config.max_gamma == 3
    assert config.anchor_predicts == shape.anchor_predicts
    assert read_shape(json.loads((tmp_path / "config.json").read_text())) == shape


@torch.no_grad()
def test_folding_at_export_changes_nothing() -> None:
    draft = make(DSPARK)
    tensors = checkpoint_tensors(draft)
    folded = make(DSPARK, seed=9)
    assert folded.markov_head is not None
    folded.markov_head.first.zero_()
    folded.markov_head.second.zero_()
    folded.feature_scale.fill_(1)
    folded.embedding.copy_(draft.embedding)
    folded.head.copy_(draft.head)
    folded.load_state_dict({k: v.to(v.dtype if k == "d2t" else torch.float32)
                            for k, v in tensors.items()}, strict=False)  # fmt: skip
    features, anchors = torch.randn(1, 9, 64), torch.tensor([[3, 8]])
    outputs = []
    for one in (draft, folded):
        hidden = one.block_hidden(features, anchors, anchors)[0]
        previous = torch.tensor([4, 9, 17, 30, 41, 2])
        logits, confidence = one.logits(hidden.flatten(0, 1), previous, torch.arange(20))
        outputs.append((logits, confidence))
    for mine, theirs in zip(outputs[0], outputs[1], strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine - theirs).norm() < 0.03 * mine.norm()


@torch.no_grad()
def test_drafting_follows_the_serial_law() -> None:
    draft = make(DSPARK)
    hidden = torch.randn(5, 3, 32)
    anchors = torch.tensor([1, 7, 7, 49, 20])
    drafts, confidence = draft_tokens(draft, hidden, anchors)
    tables = draft.markov_tables()
    assert tables is not None
    first, second = tables
    for block in range(5):
        previous = int(anchors[block])
        for k in range(3):
            logits = draft.head @ hidden[block, k] + second @ first[previous]
            joined = torch.cat([hidden[block, k], first[previous]])
            assert draft.confidence(joined[None]).item() == pytest.approx(
                float(confidence[block, k]), abs=1e-5
            )
            best = int(logits.argmax())
            previous = best + int(draft.d2t[best])
            assert int(drafts[block, k]) == previous


def test_rounds_commit_the_accepted_drafts_and_one_more() -> None:
    # Answer of 8 tokens, gamma 3. From token 0: 2 right -> next anchor 3; from 3: none -> 4;
    # from 4: all 3 right, to the end.
    correct = torch.zeros(7, 3, dtype=torch.bool)
    correct[0] = torch.tensor([True, True, False])
    correct[3] = torch.tensor([False, True, True])
    correct[4] = torch.tensor([True, True, True])
    anchors, tally = play_rounds(correct, 8)
    assert anchors == [0, 3, 4]
    assert (tally.rounds, tally.tokens) == (3, 7)
    assert tally.tau == pytest.approx(7 / 3)
    assert tally.reached == [3, 2, 2]
    assert tally.accepted == [2, 2, 1]


def test_the_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    texts = [Text([9, 9, 9, 7, 7, 30], 3, "chat"), Text([5, 30, 31], 1, "chat")]
    d2t, covered = choose_vocabulary(texts, 2, 50)
    assert (d2t + torch.arange(2)).tolist() == [7, 30]
    assert covered == pytest.approx(4 / 5)


def test_bigrams_are_learnt() -> None:
    draft = make(DSPARK)
    cycle = (torch.arange(20) + draft.d2t).tolist()
    texts = [Text(cycle * 4, 1, "chat")]
    loss = fit_bigrams(draft, texts, epochs=60, pairs=64, rate=3e-2)
    assert loss < 0.5


def test_offset_heads_look_where_they_are_told() -> None:
    shape = replace(DSPARK, heads=6, kv_heads=2, head_dim=16, hidden=96)
    torch.manual_seed(0)
    draft = Draft(
        shape,
        embedding=torch.randn(50, 96) + 0.3,
        head=torch.randn(20, 96),
        d2t=torch.zeros(20, dtype=torch.int64),
        positions=64,
    )
    features = torch.randn(200, 192) + 0.3
    attention = draft.layers[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.constant_(norm.weight, 2.0)
    assert fix_offsets(draft, features) == 1.0
    rope, length = Rope.table(64, 16, shape.rope_theta), 30
    with torch.no_grad():
        context = draft.hidden_norm(draft.fc(features[:length]))[None]
        row = draft.layers[0].input_layernorm(draft.embedding[7:8])[None]
        k = attention.k_norm(attention.k_proj(context).view(1, length, 2, 16))
        k = rope(k, torch.arange(length)[None])
        q = attention.q_norm(attention.q_proj(row).view(1, 1, 6, 16))
        q = rope(q, torch.tensor([[length]]))
        scores = q[0, 0, :3] @ k[0, :, 0].T
    assert (length - scores.argmax(-1)).tolist() == [1, 2, 3]
