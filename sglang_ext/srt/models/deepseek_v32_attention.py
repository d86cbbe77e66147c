"""Attention of DeepSeek-V3.2: latent attention over the tokens that the indexer selects.

The model projects, normalises and rotates; which cached tokens are read, and in which form, is the
attention backend's business (srt/attention/dsa.py), which gets a `DsaInputs` per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_ext import env
from sglang_ext.core.indexer_v32 import Precision, head_weights
from sglang_ext.core.mla import UpProjection
from sglang_ext.core.rope import rotate_trailing_pairs, split_cache
from sglang_ext.kernels.index_vectors import index_key, index_query
from sglang_ext.srt.attention.dsa_inputs import DsaInputs
from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config
from sglang_ext.srt.models.norms import rms_norm

# The reference builds these norms without passing config.json's rms_norm_eps.
LATENT_NORM_EPS = 1e-6


def rope_tables(config: DeepseekV32Config) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, rope / 2] float32, YaRN's own scale included."""
    rope = config.rope
    scaling: dict[str, Any] | None = None
    length = config.max_position_embeddings
    if rope.yarn:
        # The table covers original length * factor positions.
        length = rope.original_length
        scaling = {
            "rope_type": "deepseek_yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
    dim = config.qk_rope_head_dim
    table = get_rope(
        dim,
        rotary_dim=dim,
        max_position=length,
        base=int(rope.theta) if rope.theta.is_integer() else rope.theta,
        rope_scaling=scaling,
        is_neox_style=False,
        dtype=torch.float32,
    )
    # SGLang hands out a table that it made before, whatever device that was for.
    return split_cache(table.cos_sin_cache.float().to(torch.get_default_device()))


class Indexer(nn.Module):
    """Projections of the lightning indexer; every rank holds them whole and selects the same."""

    def __init__(self, config: DeepseekV32Config, prefix: str) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.heads, self.dim = heads, dim
        self.precision = Precision(env.INDEXER.get())
        self.wq_b = _whole(config.q_lora_rank, heads * dim, f"{prefix}.wq_b")
        self.wk = _whole(config.hidden_size, dim, f"{prefix}.wk")
        self.k_norm = nn.LayerNorm(dim)
        # In fp32: a rounded weight reorders the scores of close tokens.
        self.weights_proj = _whole(
            config.hidden_size, heads, f"{prefix}.weights_proj", torch.float32
        )

    def key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, dim], what the cache keeps."""
        k, _ = self.wk(x)
        return index_key(k, self.k_norm.weight, self.k_norm.bias, cos, sin, self.precision)

    def query(self, x: Tensor, c_q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden], c_q [tokens, q_lora] -> [tokens, heads, dim], [tokens, heads]."""
        q, _ = self.wq_b(c_q)
        weights, _ = self.weights_proj(x.float())
        turned = index_query(q.view(-1, self.heads, self.dim), cos, sin, self.precision)
        return turned, head_weights(weights)


class LatentAttention(nn.Module):
    """q_lora, latent keys and values, indexer; heads are split over the attention ranks."""

    def __init__(self, config: DeepseekV32Config, layer_id: int, prefix: str) -> None:
        super().__init__()
        self.config = config
        ranks = get_parallel().attn_tp_size
        if config.num_attention_heads % ranks:
            raise ValueError(
                f"--tp-size: expected an attention group that divides num_attention_heads "
                f"{config.num_attention_heads}, found {ranks} ranks. Choose another size."
            )
        self.heads = config.num_attention_heads // ranks
        self.layer_id = layer_id
        hidden, rank, dim = config.hidden_size, config.q_lora_rank, config.qk_head_dim
        self.q_a_proj = _whole(hidden, rank, f"{prefix}.q_a_proj")
        self.q_a_layernorm = rms_norm(rank, eps=LATENT_NORM_EPS)
        self.q_b_proj = _by_head(rank, config.num_attention_heads * dim, f"{prefix}.q_b_proj")
        self.kv_a_proj_with_mqa = _whole(hidden, config.latent_dim, f"{prefix}.kv_a_proj_with_mqa")
        self.kv_a_layernorm = rms_norm(config.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = _by_head(
            config.kv_lora_rank,
            config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim),
            f"{prefix}.kv_b_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.v_head_dim,
            hidden,
            bias=False,
            parallel_group="attn_tp",
            reduce_results=False,
            prefix=f"{prefix}.o_proj",
        )
        self.indexer = Indexer(config, f"{prefix}.indexer")
        self.attn = RadixAttention(
            self.heads,
            dim,
            config.softmax_scale,
            1,
            layer_id,
            v_head_dim=config.v_head_dim,
        )
        every = env.INDEX_SHARE.get()
        self.reuses_selection = layer_id % every != 0
        self.keeps_selection = every > 1

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, forward_batch: Any) -> Tensor:
        """x [tokens, hidden]; cos, sin [tokens, rope / 2] -> [tokens, hidden], a partial sum."""
        config = self.config
        c_q, _ = self.q_a_proj(x)
        c_q = self.q_a_layernorm(c_q)
        q, _ = self.q_b_proj(c_q)
        q = rotate_trailing_pairs(q.view(-1, self.heads, config.qk_head_dim), cos, sin)
        latent, _ = self.kv_a_proj_with_mqa(x)
        latent, rope = latent.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        latent = torch.cat((self.kv_a_layernorm(latent.contiguous()), rope), dim=-1)
        inputs = DsaInputs(
            latent=rotate_trailing_pairs(latent.unsqueeze(1), cos, sin).squeeze(1),
            index_key=self.indexer.key(x, cos, sin),
            index_query=lambda: self.indexer.query(x, c_q, cos, sin),
            up=UpProjection(self.kv_b_proj.weight, config.qk_nope_head_dim, config.v_head_dim),
            top_k=config.index_topk,
            reuses_selection=self.reuses_selection,
            keeps_selection=self.keeps_selection,
        )
        out = self.attn(q.flatten(1), None, None, forward_batch, dsa=inputs)
        out, _ = self.o_proj(out)
        return out


def _whole(width: int, out: int, prefix: str, dtype: torch.dtype | None = None) -> ReplicatedLinear:
    return ReplicatedLinear(width, out, bias=False, params_dtype=dtype, prefix=prefix)


def _by_head(width: int, out: int, prefix: str) -> ColumnParallelLinear:
    return ColumnParallelLinear(width, out, bias=False, parallel_group="attn_tp", prefix=prefix)
