"""Where a draft starts: the target's own last layers, fed by its own features.

From random weights a draft spends its first minutes as a bigram model. The last layers of the
target already turn such features into the next token; what is left to learn is to do so several
tokens ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sglang_ext.training.draft import Draft, DraftShape, Layer, linear
from sglang_ext.training.losses import Labels, LossWeights, block_loss, competing_tokens
from sglang_ext.training.shards import Text
from sglang_ext.training.target import Target

_FINAL_NORM_SHRINK = 0.15  # the copied norm would make the first guesses far too sure
_LAYER_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def choose_vocabulary(texts: Iterable[Text], size: int, vocab: int) -> tuple[Tensor, float]:
    """The draft vocabulary: the `size` most frequent tokens of the answers.

    Returns:
        d2t [size] int64 in EAGLE-3's convention (target id = draft id + d2t[draft id]), ids in
        ascending order, and the share of answer tokens it covers.
    """
    counts = Counter(token for text in texts for token in text.tokens[text.prompt_length :])
    ranked = [token for token, _ in counts.most_common(size)]
    spare = (token for token in range(vocab) if token not in counts)
    ranked += [next(spare) for _ in range(size - len(ranked))]
    ids = torch.tensor(sorted(ranked))
    covered = sum(counts[token] for token in ranked) / max(1, sum(counts.values()))
    return ids - torch.arange(size), covered


def new_draft(shape: DraftShape, target: Target, d2t: Tensor, *, positions: int) -> Draft:
    """A draft over the target's embedding and the head rows of `d2t`, with copied layers."""
    ids = d2t + torch.arange(len(d2t))
    head = target.head_weight[ids].contiguous()
    draft = Draft(shape, embedding=target.embedding, head=head, d2t=d2t, positions=positions)
    copied = range(target.num_layers - shape.layers, target.num_layers)
    with torch.no_grad():
        for own, source in enumerate(copied):
            for part in _LAYER_PARTS:
                parameter = draft.get_parameter(f"layers.{own}.{part}.weight")
                weight = target.weights[f"model.layers.{source}.{part}.weight"]
                if parameter.shape == weight.shape:
                    parameter.copy_(weight)
        draft.norm.weight.copy_(target.final_norm.float() * _FINAL_NORM_SHRINK)
    return draft


@torch.no_grad()
def fit_scales(draft: Draft, target: Target, features: Tensor) -> None:
    """Set the feature scale, `fc`, `hidden_norm` and the q/k norms from sample features.

    The features of a layer differ by channel by orders of magnitude; scaled to unit size, every
    column of `fc` learns at the same pace. `fc` starts as the identity on the last feature, and
    `hidden_norm` as the input norm of the first copied layer.

    Args:
        features: [rows, ids * hidden] outputs of the captured layers.
    """
    shape = draft.shape
    rms = features.float().square().mean(0).sqrt().clamp_min(1e-4)
    draft.feature_scale.copy_(rms.reciprocal())
    draft.fc.weight.normal_(std=0.02)
    last = slice(-shape.hidden, None)
    draft.fc.weight[:, last] += torch.eye(shape.hidden)
    first_copied = target.num_layers - shape.layers
    norm = target.weights[f"model.layers.{first_copied}.input_layernorm.weight"].float()
    typical = features[:, last].float().square().mean(-1).sqrt().median()
    draft.hidden_norm.weight.copy_(norm * rms[last] / typical)
    context = draft.hidden_norm(draft.fc(features * draft.feature_scale.to(features.dtype)))
    for layer in draft.layers:
        attention: Any = layer.self_attn
        for projection, norm_module in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            size = projection(context).float().view(-1, shape.head_dim).square().mean().sqrt()
            norm_module.weight.fill_(float(size))


def fit_bigrams(
    draft: Draft,
    texts: Iterable[Text],
    *,
    epochs: int = 3,
    pairs: int = 4096,
    rate: float = 5e-3,
    seed: int = 0,
) -> float:
    """Train the Markov tables alone, as a bigram model of the answers; returns the last loss.

    It costs a fraction of what learning the same through the whole draft would.
    """
    head = draft.markov_head
    assert head is not None
    generator = torch.Generator().manual_seed(seed)
    answers = [torch.tensor(text.tokens[text.prompt_length - 1 :]) for text in texts]
    previous = torch.cat([answer[:-1] for answer in answers])
    following = draft.t2d[torch.cat([answer[1:] for answer in answers])]
    previous, following = previous[following >= 0], following[following >= 0]
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, fused=True)
    weights = LossWeights(cross_entropy=1.0, total_variation=0.0, confidence=0.0)
    total = epochs * len(previous) // pairs
    average = 0.0
    for step in range(total):
        pick = torch.randint(len(previous), (pairs,), generator=generator)
        token = following[pick]
        labels = Labels(token, token[:, None], torch.ones(pairs, 1))
        subset, labels = competing_tokens(labels, draft.shape.draft_vocab, 1024, generator)
        prior = draft.previous_embedding(previous[pick]).bfloat16()
        logits = linear(prior, draft.second_table(subset))
        loss, _ = block_loss(logits, None, labels, torch.ones(pairs), weights)
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / total)
        optimizer.step()
        optimizer.zero_grad()
        average = 0.9 * average + 0.1 * float(loss.detach()) if step else float(loss.detach())
    return average


@torch.no_grad()
def fix_offsets(draft: Draft, features: Tensor, *, layer: int = 0, kv_head: int = 0) -> float:
    """Make the query heads of one kv head look at fixed distances: 1, 2, ... positions back.

    Rows begin as bare token embeddings, and what the target knew just before them reaches them
    only through attention; heads that look there at once save most of the early training. Keys
    become one constant vector, queries the same vector turned back by the distance: after the q
    and k norms only the sign of a projection matters, so a direction on which every input has a
    positive component is enough.

    Args:
        features: [rows, ids * hidden] sample features.

    Returns:
        The share of sample inputs with a positive component, 1.0 when it works for all.
    """
    shape, block = draft.shape, draft.layers[layer]
    assert isinstance(block, Layer)
    half, group = shape.head_dim // 2, shape.heads // shape.kv_heads
    context = draft.hidden_norm(draft.fc(features * draft.feature_scale.to(features.dtype)))
    ids = torch.cat([draft.d2t + torch.arange(len(draft.d2t)), torch.tensor([shape.mask_token_id])])
    rows = block.input_layernorm(draft.embedding[ids])
    on_context, on_rows = _always_positive(context, rows), _always_positive(rows)
    fast = min(8, half)  # the quickest rotations tell neighbouring positions apart
    angle = shape.rope_theta ** (-torch.arange(fast) / half)

    def put(weight: Tensor, head: int, distance: int, direction: Tensor) -> None:
        vector = torch.zeros(shape.head_dim)
        vector[:fast] = (angle * distance).cos()
        vector[half : half + fast] = -(angle * distance).sin()
        at = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        weight[at] = vector[:, None] * direction

    attention = block.self_attn
    put(attention.k_proj.weight, kv_head, 0, on_context)
    for member in range(group):
        put(attention.q_proj.weight, kv_head * group + member, member + 1, on_rows)
    checked = ((context, on_context), (rows, on_rows))
    return min(float((x.float() @ direction > 0).float().mean()) for x, direction in checked)


def _always_positive(*inputs: Tensor) -> Tensor:
    """A direction [hidden] on which inputs [rows, hidden] have a component near 1 (ridge)."""
    x = torch.cat([part.float()[:: max(1, len(part) // 4000)] for part in inputs])
    gram = x.T @ x
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram, x.sum(0))
