"""The transformer that DFLASH and DSPARK drafts share: block rows attend to injected context.

A draft layer has one pair of k / v projections. It serves the block's own rows and the target's
features `c`, which enter as keys and values only: they have no query, no residual and no MLP.
(DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from sglang.srt.distributed import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor, nn

from sglang_ext import env
from sglang_ext.core.rope import rotate_half_split, split_cache
from sglang_ext.core.spec.conv import BlockConv
from sglang_ext.core.spec.draft_config import DraftConfig, TargetFacts, parse
from sglang_ext.core.spec.draft_fields import read_config
from sglang_ext.core.spec.draft_tensors import (
    SHARED_WITH_TARGET,
    canonical,
    check_tensors,
    padded_tensors,
    read_headers,
)
from sglang_ext.core.spec.markov import draft_target_ids
from sglang_ext.kernels.linear import Linear, PlainLinear, make_linear
from sglang_ext.srt.fast_forward import call_on_refresh
from sglang_ext.srt.spec.checkpoint import local_folder

_STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DraftAttention(nn.Module):
    """Attention of one draft layer over [context ; block]."""

    def __init__(self, config: DraftConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.q_heads = self.qkv_proj.num_heads
        self.kv_heads = self.qkv_proj.num_kv_heads
        window = config.layer_windows[layer_id]
        causal = config.layer_causal[layer_id]
        self.attn = RadixAttention(
            self.q_heads,
            config.head_dim,
            config.head_dim**-0.5,
            self.kv_heads,
            layer_id,
            sliding_window_size=window - 1 if window else -1,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, forward_batch: Any) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]; cos, sin [rows, head_dim / 2]."""
        qkv, _ = self.qkv_proj(x)
        qkv = qkv.view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split((self.q_heads, self.kv_heads, self.kv_heads), dim=1)
        q = F.rms_norm(q, (self.head_dim,), self.q_norm.weight, self.q_norm.variance_epsilon)
        k = F.rms_norm(k, (self.head_dim,), self.k_norm.weight, self.k_norm.variance_epsilon)
        q, k = rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)
        out = self.attn(q.flatten(1), k, v.contiguous(), forward_batch)
        out, _ = self.o_proj(out)
        return out


class DraftMLP(nn.Module):
    """SwiGLU feed-forward of one draft layer."""

    def __init__(self, config: DraftConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act(gate_up))
        return out


class DraftLayer(nn.Module):
    """norm, attention, norm, MLP, each optionally between DFlash 2's block convolutions."""

    def __init__(self, config: DraftConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_id, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config, quant_config, f"{prefix}.mlp")
        self.attention_conv = self.mlp_conv = None
        if config.conv_kernel_size:
            shape = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv = BlockConv(*shape)
            self.mlp_conv = BlockConv(*shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, forward_batch: Any, block: int
    ) -> Tensor:
        """x [requests * block, hidden], the residual stream -> the same."""
        inner = self.input_layernorm(x)
        if self.attention_conv is None or self.mlp_conv is None:
            x = x + self.self_attn(inner, cos, sin, forward_batch)
            return x + self.mlp(self.post_attention_layernorm(x))
        mixed, deltas = self.attention_conv.before(inner.view(-1, block, inner.shape[-1]))
        out = self.self_attn(mixed.flatten(0, 1), cos, sin, forward_batch)
        x = x + self.attention_conv.after(out.view_as(mixed), deltas).flatten(0, 1)
        inner = self.post_attention_layernorm(x)
        mixed, deltas = self.mlp_conv.before(inner.view_as(mixed))
        out = self.mlp(mixed.flatten(0, 1))
        return x + self.mlp_conv.after(out.view_as(mixed), deltas).flatten(0, 1)


class DraftBackbone(nn.Module):
    """Features of the target in, hidden states of the drafted block out."""

    algorithm = ""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.folder = local_folder(get_spec().speculative_draft_model_path)
        self.draft = parse(
            read_config(self.folder), algorithm=self.algorithm, target=_own_facts(config)
        )
        draft = self.draft
        self.fc = nn.Linear(
            len(draft.target_layer_ids) * draft.hidden_size, draft.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(draft, i, quant_config, f"layers.{i}")
            for i in range(draft.num_hidden_layers)
        )
        self.norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        if draft.reduced_vocab:
            self.d2t = nn.Parameter(
                torch.empty(draft.draft_vocab_size, dtype=torch.int64), requires_grad=False
            )
        # [draft_vocab] int64, the target's id of each draft column; None when they are the same.
        self.target_columns: Tensor | None = None
        self._embed: Any = None
        self._head: Any = None
        # Products over weights of our own, packed where that pays.
        self._head_rows: Linear | None = None
        self._features: Linear | None = None
        self._context: Linear | None = None

    def get_input_embeddings(self) -> Any:
        return self._embed

    def attach_target(self, embed: nn.Module, lm_head: nn.Module, context_length: int) -> None:
        """Borrow the target's embedding and head, and size the rope table for its context."""
        draft = self.draft
        self._embed, self._head = embed, lm_head
        rope = get_rope(
            draft.head_dim,
            rotary_dim=draft.head_dim,
            max_position=max(context_length + draft.block_size + 1, draft.max_position_embeddings),
            base=draft.rope_theta,
            rope_scaling=dict(draft.rope_scaling) if draft.rope_scaling else None,
            is_neox_style=True,
        )
        self._cos, self._sin = split_cache(rope.cos_sin_cache.float())
        self._pack()
        call_on_refresh(self)

    def follow(self, model: nn.Module) -> None:
        """Copy again what was taken from the target, or from this draft, when it was replaced."""
        if model is self or getattr(model, "lm_head", None) is self._head:
            self._pack()

    def _pack(self) -> None:
        """Products over weights that are laid out once: the head's rows, fc, every layer's k, v."""
        if self.draft.reduced_vocab:
            self.target_columns = draft_target_ids(self.d2t.data)
            self._head_rows = product_over(_rows_of_head(self._head, self.target_columns))
        self._features = product_over(self.fc.weight.data)
        self._stack_context_projection()

    def _stack_context_projection(self) -> None:
        """Put every layer's k and v rows in one matrix: context is projected in one product."""
        attentions = self._attentions()
        keys_and_values = [a.qkv_proj.weight.data[a.q_heads * a.head_dim :] for a in attentions]
        self._context = product_over(torch.cat(keys_and_values))
        self._k_norms = torch.stack([a.k_norm.weight.data for a in attentions])

    def _attentions(self) -> list[DraftAttention]:
        return [cast(DraftLayer, layer).self_attn for layer in self.layers]

    def embed(self, input_ids: Tensor) -> Tensor:
        """[rows] -> [rows, hidden]."""
        x = self._embed(input_ids)
        scale = self.draft.input_embedding_scale
        return x if scale == 1.0 else x * scale

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_: Any
    ) -> LogitsProcessorOutput:
        """Hidden states of the block rows after the final norm, [rows, hidden]."""
        x = self.embed(input_ids)
        cos, sin = self._cos[positions], self._sin[positions]
        block = input_ids.shape[0] // max(forward_batch.batch_size, 1)
        for layer in self.layers:
            x = layer(x, cos, sin, forward_batch, block)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=self.norm(x))

    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, pool: Any) -> None:
        """Project the target's features and write them as draft K/V.

        features [tokens, layers_captured * hidden], positions [tokens], slots [tokens].
        """
        assert self._features is not None
        assert self._context is not None
        draft, attentions = self.draft, self._attentions()
        c = self.hidden_norm(self._features(features.to(self.fc.weight.dtype)))
        kv = self._context(c).view(
            c.shape[0], len(attentions), 2, attentions[0].kv_heads, draft.head_dim
        )
        k = F.rms_norm(kv[:, :, 0], (draft.head_dim,), eps=draft.rms_norm_eps)
        k = k * self._k_norms[None, :, None, :]
        cos, sin = self._cos[positions], self._sin[positions]
        k = rotate_half_split(k.flatten(1, 2), cos, sin).view_as(k)
        for index, attention in enumerate(attentions):
            pool.set_kv_buffer(attention.attn, slots, k[:, index], kv[:, index, 1])

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U = head(hidden): [rows, hidden] -> [rows, draft_vocab], whole on every rank."""
        if self._head_rows is not None:
            logits = self._head_rows(hidden)
        else:
            logits = whole_logits(self._head, hidden, self.draft.draft_vocab_size)
        if self.draft.output_multiplier != 1.0:
            logits = logits * self.draft.output_multiplier
        cap = self.draft.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load every tensor of the checkpoint; one that is missing, surplus or misshaped raises."""
        check_tensors(self.draft, read_headers(self.folder))
        params = dict(self.named_parameters()) | dict(self.named_buffers())
        padded = padded_tensors(self.draft)
        for raw_name, tensor in weights:
            name = canonical(raw_name)
            if name in SHARED_WITH_TARGET or name == "t2d":
                continue
            target, shard = _placement(name)
            parameter = params[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            if name in padded:
                tensor = tensor[: parameter.shape[0]]
            if shard is None:
                loader(parameter, tensor)
            else:
                loader(parameter, tensor, shard)


def product_over(weight: Tensor) -> Linear:
    """x W^T, packed unless the user keeps SGLang's own layers."""
    return make_linear(weight) if env.FAST_FORWARD.get() else PlainLinear(weight)


def whole_logits(lm_head: Any, hidden: Tensor, vocab: int) -> Tensor:
    """The target's head over [rows, hidden], gathered over its ranks: [rows, vocab]."""
    logits = lm_head.quant_method.apply(lm_head, hidden)
    if get_parallel().tp_size > 1:
        logits = tensor_model_parallel_all_gather(logits)
    return logits[:, :vocab]


def _placement(name: str) -> tuple[str, Any]:
    """(parameter, shard) a checkpoint tensor goes to; shard None for a parameter of its own."""
    # A gated Markov head has a gate_proj as well, which is a matrix of its own.
    for part, (stacked, shard) in _STACKED.items():
        if name.startswith("layers.") and f".{part}." in name:
            return name.replace(part, stacked), shard
    return name, None


_target_vocab: ContextVar[int | None] = ContextVar("vocabulary of the target", default=None)


@contextmanager
def beside_target(vocab: int) -> Iterator[None]:
    """Drafts built inside are for a target of `vocab` tokens; their tables may be padded."""
    token = _target_vocab.set(vocab)
    try:
        yield
    finally:
        _target_vocab.reset(token)


def _own_facts(config: Any) -> TargetFacts:
    """The checkpoint's own word on its target; the worker has held it to the real one already."""
    layers = getattr(config, "num_target_layers", None) or 1 << 20
    return TargetFacts(
        num_hidden_layers=layers,
        hidden_size=config.hidden_size,
        vocab_size=_target_vocab.get() or config.vocab_size,
        outputs_captured=True,
    )


def _rows_of_head(lm_head: Any, ids: Tensor) -> Tensor:
    """[draft_vocab, hidden]: the head's rows at `ids`, gathered over the ranks that shard it."""
    weight = lm_head.weight.data
    if get_parallel().tp_size == 1:
        return weight[ids].contiguous()
    shard = lm_head.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    mine = (ids >= start) & (ids < end)
    rows = torch.zeros(ids.shape[0], weight.shape[1], dtype=weight.dtype, device=weight.device)
    rows[mine] = weight[ids[mine] - start]
    return tensor_model_parallel_all_reduce(rows)
