"""Attention of DeepSeek-V4: one latent per token as key and value, read where a layer may look.

The model projects, normalises and rotates. Which cached rows are read, and how blocks become
entries, is the attention backend's business (srt/attention/dsv4.py), which gets a `Dsv4Inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed import attention_tensor_model_parallel_all_reduce
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_ext import env
from sglang_ext.core.compress import CSA, raw_rows, series_of
from sglang_ext.core.indexer_v4 import head_weights
from sglang_ext.core.rope import rotate_trailing_pairs
from sglang_ext.core.yarn import angles, frequencies
from sglang_ext.kernels.grouped_output import grouped_output
from sglang_ext.kernels.index_vectors import index_query_v4
from sglang_ext.srt.attention.dsv4_inputs import Dsv4Inputs, IndexInputs, NewRows
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config
from sglang_ext.srt.models.norms import rms_norm


class Rotation(nn.Module):
    """Angles of one kind of layer: plain with a window only, stretched where entries are read."""

    def __init__(self, config: DeepseekV4Config, *, compressed: bool) -> None:
        super().__init__()
        theta = config.compress_rope_theta if compressed else config.rope_theta
        yarn = config.yarn if compressed else None
        frequency = frequencies(config.qk_rope_head_dim, theta, yarn)
        self.register_buffer("frequency", frequency, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] -> (cos, sin), each [tokens, rope / 2] float32."""
        frequency: Any = self.frequency
        return angles(positions, frequency)


@dataclass(frozen=True)
class Turn:
    """The rotation of one forward's rows, which every layer of its kind shares.

    cos, sin: [tokens, rope / 2] float32. rotation: for other positions, those of entries.
    """

    cos: Tensor
    sin: Tensor
    rotation: Rotation

    @classmethod
    def of(cls, rotation: Rotation, positions: Tensor) -> Turn:
        cos, sin = rotation(positions)
        return cls(cos, sin, rotation)


class Compressor(nn.Module):
    """What every token gives to the entries that pool it; each rank holds all of it.

    In fp32, as published: entries gather hundreds of tokens' worth of rounding.
    """

    def __init__(self, config: DeepseekV4Config, ratio: int, dim: int, prefix: str) -> None:
        super().__init__()
        width = series_of(ratio) * dim
        self.wkv = _whole(config.hidden_size, width, f"{prefix}.wkv", torch.float32)
        self.wgate = _whole(config.hidden_size, width, f"{prefix}.wgate", torch.float32)
        self.ape = nn.Parameter(torch.empty(ratio, width, dtype=torch.float32))
        self.norm = rms_norm(dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor) -> NewRows:
        """x [tokens, hidden] -> rows to store, final from the start."""
        wide = x.float()
        kv, _ = self.wkv(wide)
        gate, _ = self.wgate(wide)
        return NewRows(raw_rows(kv, gate, self.ape, positions), self.norm.weight)


class Indexer(nn.Module):
    """Its own compressor and queries; every rank holds it whole and selects the same."""

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.top_k = config.index_topk
        self.compressor = Compressor(config, CSA, self.dim, f"{prefix}.compressor")
        self.wq_b = _whole(config.q_lora_rank, self.heads * self.dim, f"{prefix}.wq_b")
        # In fp32: a rounded weight reorders the scores of close entries.
        self.weights_proj = _whole(
            config.hidden_size, self.heads, f"{prefix}.weights_proj", torch.float32
        )

    def query(self, x: Tensor, c_q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden], c_q [tokens, q_lora] -> [tokens, heads, dim], [tokens, heads]."""
        q, _ = self.wq_b(c_q)
        weights, _ = self.weights_proj(x.float())
        return index_query_v4(q.view(-1, self.heads, self.dim), cos, sin), head_weights(weights)


class SharedLatentAttention(nn.Module):
    """Window, compressed entries and sink; heads and output groups are split over the ranks."""

    def __init__(self, config: DeepseekV4Config, layer_id: int, ratio: int, prefix: str) -> None:
        super().__init__()
        self.ratio, self.eps, self.dim = ratio, config.rms_norm_eps, config.head_dim
        parallel = get_parallel()
        ranks, rank = parallel.attn_tp_size, parallel.attn_tp_rank
        if config.o_groups % ranks:
            raise ValueError(
                f"--tp-size: expected an attention group that divides o_groups "
                f"{config.o_groups}, found {ranks} ranks. Choose another size."
            )
        self.heads = config.num_attention_heads // ranks
        self.groups, self.rank = config.o_groups // ranks, rank
        hidden, lora, whole = config.hidden_size, config.q_lora_rank, config.num_attention_heads
        self.wq_a = _whole(hidden, lora, f"{prefix}.wq_a")
        self.q_norm = rms_norm(lora, eps=config.rms_norm_eps)
        self.wq_b = ColumnParallelLinear(
            lora, whole * self.dim, bias=False, parallel_group="attn_tp", prefix=f"{prefix}.wq_b"
        )
        self.wkv = _whole(hidden, self.dim, f"{prefix}.wkv")
        self.kv_norm = rms_norm(self.dim, eps=config.rms_norm_eps)
        self.wo_a = GroupedLinear(self.groups, config.o_lora_rank, config.group_width, rank)
        self.wo_b = RowParallelLinear(
            config.o_groups * config.o_lora_rank,
            hidden,
            bias=False,
            parallel_group="attn_tp",
            reduce_results=False,
            prefix=f"{prefix}.wo_b",
        )
        self.attn_sink = _sharded(torch.empty(self.heads, dtype=torch.float32), rank)
        self.compressor = None
        self.indexer = None
        if ratio:
            self.compressor = Compressor(config, ratio, self.dim, f"{prefix}.compressor")
        if ratio == CSA:
            self.indexer = Indexer(config, f"{prefix}.indexer")
        every = env.INDEX_SHARE.get()
        self.reuses_selection = config.compress_ratios[:layer_id].count(CSA) % every != 0
        self.keeps_selection = every > 1
        self.attn = RadixAttention(self.heads, self.dim, self.dim**-0.5, 1, layer_id)

    def forward(self, x: Tensor, turn: Turn, positions: Tensor, forward_batch: Any) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], summed over the attention ranks."""
        cos, sin = turn.cos, turn.sin
        c_q, _ = self.wq_a(x)
        c_q = self.q_norm(c_q)
        q, _ = self.wq_b(c_q)
        q = rotate_trailing_pairs(_unit(q.view(-1, self.heads, self.dim), self.eps), cos, sin)
        latent, _ = self.wkv(x)
        latent = rotate_trailing_pairs(self.kv_norm(latent).unsqueeze(1), cos, sin).squeeze(1)
        inputs = Dsv4Inputs(
            latent=latent,
            sink=self.attn_sink,
            ratio=self.ratio,
            eps=self.eps,
            angles=turn.rotation,
            new=None if self.compressor is None else self.compressor(x, positions),
            index=self._index(x, c_q, cos, sin, positions),
        )
        out = self.attn(q.flatten(1), None, None, forward_batch, v4=inputs)
        # The values carry the keys' rotation; it is undone before heads are mixed.
        by_group = grouped_output(out.view_as(q), cos, sin, self.wo_a.grouped())
        y, _ = self.wo_b(by_group)
        return attention_tensor_model_parallel_all_reduce(y)

    def _index(
        self, x: Tensor, c_q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> IndexInputs | None:
        indexer = self.indexer
        if indexer is None:
            return None
        return IndexInputs(
            new=indexer.compressor(x, positions),
            query=lambda: indexer.query(x, c_q, cos, sin),
            top_k=indexer.top_k,
            reuses_selection=self.reuses_selection,
            keeps_selection=self.keeps_selection,
        )


class GroupedLinear(nn.Module):
    """[groups * rank, width] weight of the output projection's groups on this rank."""

    def __init__(self, groups: int, lora: int, width: int, rank: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = _sharded(torch.empty(groups * lora, width), rank)

    def grouped(self) -> Tensor:
        """[groups, rank, width]."""
        return self.weight.view(self.groups, -1, self.weight.shape[1])


def _unit(q: Tensor, eps: float) -> Tensor:
    """Every head divided by its root mean square; q [tokens, heads, dim]."""
    wide = q.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(q.dtype)


def _whole(width: int, out: int, prefix: str, dtype: torch.dtype | None = None) -> ReplicatedLinear:
    return ReplicatedLinear(width, out, bias=False, params_dtype=dtype, prefix=prefix)


def _sharded(local: Tensor, rank: int) -> nn.Parameter:
    """A parameter that loads its rank's share of the first axis."""
    parameter: Any = nn.Parameter(local, requires_grad=False)

    def load(target: Tensor, whole: Tensor) -> None:
        share = target.shape[0]
        target.data.copy_(whole[rank * share : (rank + 1) * share])

    parameter.weight_loader = load
    return parameter
