"""The DSpark draft inside a DeepSeek-V4 checkpoint: complete V4 blocks over injected context.

    context    c = main_norm(main_proj(features of the target)), the same for every stage; a stage
               keeps rotate(kv_norm(wkv c)) at the tokens' slots and c goes no further
    block      ids [anchor, noise, ...] at the positions behind the context; every row attends to
               the last `sliding_window` context rows and to all rows of its block
    output     h = hc_head(streams); logits head(norm(h)) plus the Markov bias; confidence from h
(arXiv:2607.05147 for the scheme; tensor names of DeepSeek-V4-Flash-DSpark.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from torch import Tensor, nn

from sglang_ext.core.rope import rotate_trailing_pairs
from sglang_ext.core.spec.confidence import ConfidenceHead
from sglang_ext.core.spec.markov import build_markov_head
from sglang_ext.kernels.hyper_connection import hc_head
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention
from sglang_ext.srt.attention.dsv4_inputs import Dsv4Inputs
from sglang_ext.srt.models.deepseek_v4 import DecoderLayer, wide
from sglang_ext.srt.models.deepseek_v4_attention import Rotation, Turn
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config, parse
from sglang_ext.srt.models.deepseek_v4_load import load
from sglang_ext.srt.models.deepseek_v4_names import TARGET_NAMES, dspark_tensors
from sglang_ext.srt.models.draft_backbone import product_over, whole_logits
from sglang_ext.srt.models.norms import rms_norm
from sglang_ext.srt.spec.bundled import TARGET_CONFIG


@dataclass(frozen=True)
class Visible:
    """What the rows of a draft block attend to.

    context: [rows, window] int64 pool slots, -1 before the start of the text.
    block: [rows, block] int64, the rows of the same request's block.
    """

    context: Tensor
    block: Tensor

    @classmethod
    def of(cls, forward_batch: Any, rows: int, window: int) -> Visible:
        """For `rows` rows, the same number per request, behind `seq_lens` context tokens."""
        prefix, requests = forward_batch.seq_lens, forward_batch.req_pool_indices
        block = rows // max(len(prefix), 1)
        position = prefix[:, None] - window + torch.arange(window, device=prefix.device)
        table = get_req_to_token_pool().req_to_token
        slots = table[requests[:, None], position.clamp(min=0)].long()
        slots = torch.where(position < 0, -1, slots)
        own = torch.arange(rows, device=prefix.device).view(-1, block)
        return cls(*(part.repeat_interleave(block, dim=0) for part in (slots, own)))


class BlockAttention(nn.Module):
    """Stands where a target layer calls its attention backend."""

    def __init__(self, heads: int, dim: int, stage: int) -> None:
        super().__init__()
        self.heads, self.dim, self.stage = heads, dim, stage
        self.visible: Visible | None = None

    def forward(self, q: Tensor, _k: None, _v: None, _batch: Any, *, v4: Dsv4Inputs) -> Tensor:
        """[rows, heads * dim] -> the same; v4.latent are the block's own keys and values."""
        assert self.visible is not None
        pool = get_token_to_kv_pool().get_key_buffer(self.stage).squeeze(1)
        sources = (Rows(pool, self.visible.context), Rows(v4.latent, self.visible.block))
        q = q.view(-1, self.heads, self.dim)
        scale = self.dim**-0.5
        out = sparse_attention(q, sources, sink=v4.sink, scale=scale, value_dim=self.dim)
        return out.flatten(1)


class Stage(DecoderLayer):
    """mtp.N: a block without a compressor; the first also reads features, the last also speaks."""

    def __init__(self, config: DeepseekV4Config, stage: int, prefix: str) -> None:
        super().__init__(config, stage, 0, prefix, hashed=False)
        facts = config.dspark
        assert facts is not None
        hidden, n = config.hidden_size, config.hc_mult
        self.attn.attn = BlockAttention(self.attn.heads, config.head_dim, stage)
        if stage == 0:
            captured = len(facts.target_layer_ids) * hidden
            self.main_proj = ReplicatedLinear(
                captured, hidden, bias=False, prefix=f"{prefix}.main_proj"
            )
            self.main_norm = rms_norm(hidden, eps=config.rms_norm_eps)
        if stage == facts.stages - 1:
            self.norm = rms_norm(hidden, eps=config.rms_norm_eps)
            self.hc_head_fn, self.hc_head_base = wide(n, n * hidden), wide(n)
            self.hc_head_scale = wide(1)
            self.markov_head = build_markov_head(
                "vanilla",
                vocab_size=config.vocab_size,
                draft_vocab_size=config.vocab_size,
                rank=facts.markov_rank,
                hidden_size=hidden,
            )
            self.confidence_head = ConfidenceHead(hidden, facts.markov_rank, bias=False)

    def context_latent(self, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """c [tokens, hidden] -> rotated latents [tokens, dim]."""
        latent, _ = self.attn.wkv(context)
        latent = self.attn.kv_norm(latent).unsqueeze(1)
        return rotate_trailing_pairs(latent, cos, sin).squeeze(1)


class Stages(nn.Module):
    """Under the names of the checkpoint."""

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__()
        assert config.dspark is not None
        # Typed Any: the stages' own attributes are what this file works with.
        self.mtp: Any = nn.ModuleList(
            Stage(config, stage, f"{prefix}.mtp.{stage}") for stage in range(config.dspark.stages)
        )


class DeepseekV4DSparkDraft(nn.Module):
    """What the DSPARK worker drafts with."""

    # The draft speaks the target's whole vocabulary.
    target_columns: Tensor | None = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.facts = parse(getattr(config, TARGET_CONFIG))
        self.model = Stages(self.facts, f"{prefix}.model" if prefix else "model")
        self.rotation = Rotation(self.facts, compressed=False)
        self._embed: Any = None
        self._head: Any = None

    @property
    def first(self) -> Any:
        return self.model.mtp[0]

    @property
    def last(self) -> Any:
        return self.model.mtp[-1]

    @property
    def markov_head(self) -> Any:
        return self.last.markov_head

    @property
    def confidence_head(self) -> Any:
        return self.last.confidence_head

    def get_input_embeddings(self) -> Any:
        return self._embed

    def attach_target(self, embed: nn.Module, lm_head: nn.Module, context_length: int) -> None:
        """Borrow the target's embedding and head."""
        # Kept out of the module tree: they are the target's to load and to save.
        object.__setattr__(self, "_embed", embed)
        object.__setattr__(self, "_head", lm_head)
        self.markov_head.product = product_over(self.markov_head.markov_w2.weight.data)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_: Any
    ) -> LogitsProcessorOutput:
        """Collapsed hidden states of the block rows before the final norm, [rows, hidden]."""
        config = self.facts
        visible = Visible.of(forward_batch, len(input_ids), config.sliding_window)
        streams = self._embed(input_ids).unsqueeze(1).repeat(1, config.hc_mult, 1)
        turn = Turn.of(self.rotation, positions)
        for stage in self.model.mtp:
            stage.attn.attn.visible = visible
            streams = stage(streams, turn, positions, input_ids, forward_batch)
        weights = (self.last.hc_head_fn, self.last.hc_head_base, self.last.hc_head_scale)
        hidden = hc_head(streams, *weights, eps=config.hc_eps, rms_eps=config.rms_norm_eps)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    @torch.no_grad()
    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, pool: Any) -> None:
        """Keep every stage's latents of new context tokens.

        features [tokens, captured * hidden], positions [tokens], slots [tokens].
        """
        context, _ = self.first.main_proj(features.to(self.first.main_proj.weight.dtype))
        context = self.first.main_norm(context)
        cos, sin = self.rotation(positions)
        for number, stage in enumerate(self.model.mtp):
            latents = pool.get_key_buffer(number).squeeze(1)
            latents[slots] = stage.context_latent(context, cos, sin).to(latents.dtype)

    @torch.no_grad()
    def base_logits(self, hidden: Tensor) -> Tensor:
        """head(norm(h)): [rows, hidden] -> [rows, vocab], whole on every rank."""
        return whole_logits(self._head, self.last.norm(hidden), self.facts.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the draft's tensors; the target's, in the same files, are passed over.

        Raises:
            DeepseekV4TensorError: anything missing, surplus or misshaped.
        """
        wanted = dspark_tensors(self.facts)
        load(self, self.facts, weights, wanted, partial=False, passed=TARGET_NAMES)


EntryClass = DeepseekV4DSparkDraft
