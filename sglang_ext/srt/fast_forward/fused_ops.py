"""Shorter torch versions of SGLang's norms and rotary embedding, through its own registry.

    SGLang   BaseFusedOp.register_oot_forward(op class, function(self, ...), platform key)
A layer with an option that these versions do not cover runs SGLang's `forward_native`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.platforms import current_platform
from torch import Tensor

from sglang_ext.kernels.norm import rms_norm
from sglang_ext.kernels.rope import rotate


def is_plain_norm(norm: RMSNorm) -> bool:
    """Whether the norm is y = x / rms(x) * weight and nothing else."""
    return (
        not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and norm.variance_size_override is None
    )


def is_plain_rotary(rope: RotaryEmbedding) -> bool:
    """Whether the embedding rotates whole heads, half-split, from one table of [cos, sin]."""
    return (
        type(rope).forward_native is RotaryEmbedding.forward_native
        and rope.is_neox_style
        and rope.rotary_dim == rope.head_size
        and not hasattr(rope, "sin_cos_cache")
    )


def _norm(
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    weight = self.weight
    if not is_plain_norm(self) or weight.dtype != x.dtype or x.shape[-1] != self.hidden_size:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return rms_norm(x, weight, self.variance_epsilon)
    residual = x + residual
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return rms_norm(residual, weight, self.variance_epsilon), residual


def _rotary(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    if not is_plain_rotary(self) or fused_set_kv_buffer_arg is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    if offsets is not None:
        positions = positions + offsets
    cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype).chunk(2, -1)
    cos = torch.cat((cos, cos), -1).unsqueeze(1)
    sin = torch.cat((-sin, sin), -1).unsqueeze(1)
    rows = cos.shape[0]
    turned = [
        rotate(x.reshape(rows, -1, self.head_size), cos, sin).view(x.shape) for x in (query, key)
    ]
    return turned[0], turned[1]


def register() -> None:
    """Takes effect for every op that has not run yet."""
    key = current_platform.get_dispatch_key_name()
    BaseFusedOp.register_oot_forward(RMSNorm, _norm, key)
    for kind in (RotaryEmbedding, Llama3RotaryEmbedding):
        BaseFusedOp.register_oot_forward(kind, _rotary, key)
