"""The draft being trained: a few Qwen3-style layers over a block, fed with target features.

Parameter names are those of the public checkpoint formats, so that exporting is folding two
things that exist only in training: the scale of the target's features (into `fc`) and the
projections of the target's embedding and head that the Markov tables start from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.core.spec.block import BlockLayout

_BLOCKS_PER_PART = 16  # blocks that share one attention call and mask each other out
Algorithm = Literal["DSPARK", "DFLASH"]


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft. `block_size` is the checkpoint's own number (see `BlockLayout`).

    anchor_predicts: DeepSpec's block layout, for DSPARK and its `dflash_*_block7` drafts; False
        is z-lab's, where each mask row predicts the token at its own position.
    """

    algorithm: Algorithm
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    vocab: int
    draft_vocab: int
    markov_rank: int
    rope_theta: float
    norm_eps: float
    anchor_predicts: bool = True

    @property
    def layout(self) -> BlockLayout:
        """Rows of a block and which of them predict."""
        if self.anchor_predicts:
            return BlockLayout.dspark(self.block_size)
        return BlockLayout.dflash(self.block_size)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 product with a master weight of any dtype."""
    return F.linear(x, weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class Weight(nn.Module):
    """A weight without bias, so that names end in `.weight`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * columns**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


@dataclass(frozen=True)
class Rope:
    """cosine, sine [positions, head_dim / 2] fp32."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def table(cls, positions: int, head_dim: int, theta: float) -> Rope:
        frequency = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        angle = torch.arange(positions).double()[:, None] * frequency
        return cls(angle.cos().float(), angle.sin().float())

    def __call__(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x [batch, rows, heads, head_dim] at position [batch, rows]."""
        cosine = self.cosine[position].unsqueeze(2).to(x.dtype)
        sine = self.sine[position].unsqueeze(2).to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


@dataclass(frozen=True)
class View:
    """Where the rows of a batch stand and what they see.

    rows [parts, blocks * rows], context [1, T]: positions. mask: additive, [parts, 1,
    blocks * rows, T + blocks * rows]; a row sees the context before its anchor and its own block.
    """

    rope: Rope
    rows: Tensor
    context: Tensor
    mask: Tensor

    @classmethod
    def of(cls, anchors: Tensor, rows: int, length: int, rope: Rope, dtype: torch.dtype) -> View:
        """Blocks of `rows` rows at anchors [parts, blocks] over a context of `length`."""
        parts, blocks = anchors.shape
        past = torch.arange(length) < anchors[..., None]
        past = past.repeat_interleave(rows, dim=1)
        block = torch.arange(blocks).repeat_interleave(rows)
        own = (block[:, None] == block).expand(parts, -1, -1)
        unseen = ~torch.cat([past, own], dim=-1)
        mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
        return cls(
            rope=rope,
            rows=(anchors[..., None] + torch.arange(rows)).flatten(1),
            context=torch.arange(length)[None],
            mask=mask[:, None],
        )


class Attention(nn.Module):
    """Non-causal attention of block rows over the context before their anchor and the block."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = Weight(q, shape.hidden)
        self.k_proj = Weight(kv, shape.hidden)
        self.v_proj = Weight(kv, shape.hidden)
        self.o_proj = Weight(shape.hidden, q)
        self.q_norm = Norm(shape.head_dim, shape.norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        """x [parts, blocks * rows, hidden], context [texts, T, hidden] -> like x.

        A text's blocks come in several parts: rows of one part meet only each other's keys.
        """
        parts = len(x) // len(context)
        q = view.rope(self.q_norm(self._heads(self.q_proj(x))), view.rows)
        own_k = view.rope(self.k_norm(self._heads(self.k_proj(x))), view.rows)
        past_k = view.rope(self.k_norm(self._heads(self.k_proj(context))), view.context)
        past_v, own_v = (self._heads(self.v_proj(y)) for y in (context, x))
        k = torch.cat([past_k.repeat_interleave(parts, dim=0), own_k], dim=1)
        v = torch.cat([past_v.repeat_interleave(parts, dim=0), own_v], dim=1)
        group = self.shape.heads // self.shape.kv_heads
        k, v = (y.repeat_interleave(group, dim=2).transpose(1, 2) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=view.mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_dim)


class Mlp(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = Weight(shape.intermediate, shape.hidden)
        self.up_proj = Weight(shape.intermediate, shape.hidden)
        self.down_proj = Weight(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, view)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovTables(nn.Module):
    """The vanilla head, bias = W2 W1[previous]; each table is a projection plus a correction.

    W1 = embedding @ first + markov_w1 and W2 = head @ second + markov_w2: tokens that the
    training text hardly shows get what similar tokens learned.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        rank, hidden = shape.markov_rank, shape.hidden
        self.markov_w1 = Weight(shape.vocab, rank)
        self.markov_w2 = Weight(shape.draft_vocab, rank)
        self.first = nn.Parameter(torch.randn(hidden, rank) * hidden**-0.5)
        self.second = nn.Parameter(torch.zeros(hidden, rank))  # no bias to begin with
        nn.init.zeros_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)


class Draft(nn.Module):
    """A DSPARK or DFLASH draft over a frozen embedding and a frozen, reduced head.

    Args:
        embedding: [vocab, hidden] the target's. head: [draft_vocab, hidden] rows of the target's.
        d2t: [draft_vocab] int64, EAGLE-3's offsets: target id = draft id + d2t[draft id].
        positions: longest text.
    """

    embedding: Tensor
    head: Tensor
    d2t: Tensor
    t2d: Tensor
    feature_scale: Tensor
    table_scale: Tensor

    def __init__(
        self, shape: DraftShape, *, embedding: Tensor, head: Tensor, d2t: Tensor, positions: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        features = len(shape.target_layer_ids) * shape.hidden
        self.fc = Weight(shape.hidden, features)
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.markov_head = MarkovTables(shape) if shape.markov_rank else None
        self.confidence_head: nn.ModuleDict | None = None
        if shape.markov_rank:
            proj = nn.Linear(shape.hidden + shape.markov_rank, 1)
            nn.init.zeros_(proj.weight)
            self.confidence_head = nn.ModuleDict({"proj": proj})
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("d2t", d2t)
        ids = torch.arange(shape.draft_vocab)
        t2d = torch.full((shape.vocab,), -1).index_put_((ids + d2t,), ids)
        self.register_buffer("t2d", t2d, persistent=False)
        self.register_buffer("feature_scale", torch.ones(features))
        # Rows of unit length on average, whatever the target's own scale.
        norms = torch.stack([t.float().square().sum(-1).mean().sqrt() for t in (embedding, head)])
        self.register_buffer("table_scale", norms.reciprocal() * shape.hidden**0.5)
        self._rope = Rope.table(positions + shape.block_size, shape.head_dim, shape.rope_theta)

    def block_hidden(self, features: Tensor, anchors: Tensor, anchor_tokens: Tensor) -> Tensor:
        """The backbone: predicting rows after the final norm.

        Args:
            features: [texts, T, ids * hidden] outputs of the captured target layers, bf16.
            anchors, anchor_tokens: [texts, blocks] int64 position and id of the anchors.

        Returns:
            [texts, blocks, gamma, hidden]; row k predicts the token at anchor + k + 1.
        """
        layout = self.shape.layout
        scale = self.feature_scale.to(features.dtype)
        context = self.hidden_norm(self.fc(features * scale))
        spare = -anchors.shape[1] % _BLOCKS_PER_PART
        parts, anchor_tokens = (
            F.pad(y, (0, spare)).view(-1, _BLOCKS_PER_PART) for y in (anchors, anchor_tokens)
        )
        ids = layout.block_ids(anchor_tokens.flatten(), self.shape.mask_token_id)
        x = self.embedding[ids].view(len(parts), -1, self.shape.hidden).to(features.dtype)
        view = View.of(parts, layout.query_rows, features.shape[1], self._rope, x.dtype)
        for layer in self.layers:
            x = layer(x, context, view)
        x = x.view(len(anchors), -1, layout.query_rows, self.shape.hidden)
        return self.norm(x[:, : anchors.shape[1], layout.first_predicting_row :])

    def markov_tables(self) -> tuple[Tensor, Tensor] | None:
        """(W1 [vocab, rank], W2 [draft_vocab, rank]) as exported, or None for DFLASH."""
        if self.markov_head is None:
            return None
        return self._first_table(self.embedding, self.markov_head.markov_w1.weight), (
            self.second_table(slice(None))
        )

    def previous_embedding(self, previous: Tensor) -> Tensor:
        """W1[previous] for previous [...] int64 -> [..., rank]; DSPARK only."""
        assert self.markov_head is not None
        flat, inverse = previous.unique(return_inverse=True)
        rows = self._first_table(self.embedding[flat], self.markov_head.markov_w1.weight[flat])
        return rows[inverse]

    def logits(
        self, hidden: Tensor, previous: Tensor, subset: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draft logits over a subset of the draft vocabulary and, for DSPARK, the confidence.

        Args:
            hidden: [rows, hidden]. previous: [rows] int64, the token before each predicted one.
            subset: [n] int64 draft ids.

        Returns:
            [rows, n] and [rows] (None for DFLASH).
        """
        base = linear(hidden, self.head[subset])
        if self.markov_head is None:
            return base, None
        prior = self.previous_embedding(previous).to(hidden.dtype)
        second = self.second_table(subset).to(hidden.dtype)
        logits = torch.addmm(base, prior, second.t())
        return logits, self.confidence(torch.cat([hidden, prior], dim=-1))

    def confidence(self, hidden_and_prior: Tensor) -> Tensor:
        """Raw confidence logits [rows]; the backbone is not trained through them."""
        assert self.confidence_head is not None
        proj = self.confidence_head["proj"]
        out: Tensor = proj(hidden_and_prior.detach().float()).squeeze(-1)
        return out

    def _first_table(self, embedding: Tensor, correction: Tensor) -> Tensor:
        assert self.markov_head is not None
        return (embedding.float() * self.table_scale[0]) @ self.markov_head.first + correction

    def second_table(self, ids: Tensor | slice) -> Tensor:
        """W2[ids] [n, rank]; DSPARK only."""
        assert self.markov_head is not None
        projected = (self.head[ids].float() * self.table_scale[1]) @ self.markov_head.second
        return projected + self.markov_head.markov_w2.weight[ids]
