"""Reads a decoder stack of SGLang's into plain parts, or says why it is not one we know.

The classes are compared exactly: a subclass may compute something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaMLP, LlamaModel
from sglang.srt.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from sglang.srt.models.qwen3 import Qwen3DecoderLayer, Qwen3Model
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel
from torch import Tensor

from sglang_ext.kernels.linear import Gated, Linear, PlainLinear, make_gated, make_linear
from sglang_ext.kernels.linear.gated import SplitGated
from sglang_ext.kernels.norm import RmsNorm
from sglang_ext.srt.fast_forward.fused_ops import is_plain_norm, is_plain_rotary

_STACKS: dict[type, type] = {
    LlamaModel: LlamaDecoderLayer,
    Qwen2Model: Qwen2DecoderLayer,
    Qwen3Model: Qwen3DecoderLayer,
}


class NotFlat(Exception):
    """Why a stack stays as it is."""


@dataclass(frozen=True)
class FlatLayer:
    """One decoder layer as calls.

    qk_norm: [query heads + key heads, dim] weights of the per-head norms, or None.
    qk_v_heads, q_k_heads: head counts to split the fused projection by, in two steps.
    """

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: Tensor | None
    qk_eps: float
    qk_v_heads: tuple[int, int]
    q_k_heads: tuple[int, int]
    head_dim: int
    attn: RadixAttention
    out: Linear
    mlp_norm: RmsNorm
    gated: Gated
    down: Linear


def check_process() -> None:
    """Raises NotFlat where the stack's glue does more than pass tensors on."""
    parallel = get_parallel()
    if parallel.tp_size != 1 or parallel.pp_group.world_size != 1:
        raise NotFlat("layers of a model split over ranks")
    if get_lora().enable_lora:
        raise NotFlat("layers that may carry LoRA adapters")
    if get_exec().deterministic.rl_on_policy_target is not None:
        raise NotFlat("layers in reinforcement-learning numerics")


def check_stack(stack: Any) -> Any:
    """The rotary embedding that all layers share."""
    layer_class = _STACKS.get(type(stack))
    if layer_class is None:
        raise NotFlat(f"decoder stack {type(stack).__name__}")
    for layer in stack.layers:
        if type(layer) is not layer_class:
            raise NotFlat(f"decoder layer {type(layer).__name__}")
    rope = stack.layers[0].self_attn.rotary_emb
    if any(layer.self_attn.rotary_emb is not rope for layer in stack.layers):
        raise NotFlat("layers with rotary embeddings of their own")
    if not is_plain_rotary(rope):
        raise NotFlat(f"rotary embedding {type(rope).__name__}")
    return rope


def layer_linears(layer: Any) -> tuple[LinearBase, ...]:
    return (
        layer.self_attn.qkv_proj,
        layer.self_attn.o_proj,
        layer.mlp.gate_up_proj,
        layer.mlp.down_proj,
    )


def read_layer(layer: Any, *, pack: bool) -> FlatLayer:
    """Parts of a Llama, Qwen2 or Qwen3 decoder layer; with `pack`, over packed weights."""
    attention, mlp = layer.self_attn, layer.mlp
    kinds = (QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
    linears = layer_linears(layer)
    for linear, kind in zip(linears, kinds, strict=True):
        _check_linear(linear, kind)
    _check_mlp(mlp)
    if type(attention.attn) is not RadixAttention or attention.attn.is_cross_attention:
        raise NotFlat(f"attention {type(attention.attn).__name__}")
    make = make_linear if pack else PlainLinear
    qkv, out, gate_up, down = (x.weight.data for x in linears)
    qk_norm, qk_eps = _read_qk_norm(attention)
    return FlatLayer(
        input_norm=read_norm(layer.input_layernorm),
        qkv=make(qkv, _bias(attention.qkv_proj)),
        qk_norm=qk_norm,
        qk_eps=qk_eps,
        qk_v_heads=(attention.num_heads + attention.num_kv_heads, attention.num_kv_heads),
        q_k_heads=(attention.num_heads, attention.num_kv_heads),
        head_dim=attention.head_dim,
        attn=attention.attn,
        out=make(out, _bias(attention.o_proj)),
        mlp_norm=read_norm(layer.post_attention_layernorm),
        gated=_gated(gate_up, _bias(mlp.gate_up_proj), pack=pack),
        down=make(down, _bias(mlp.down_proj)),
    )


def read_norm(norm: Any) -> RmsNorm:
    _check_norm(norm)
    return RmsNorm(norm.weight.data, norm.variance_epsilon)


def _gated(weight: Tensor, bias: Tensor | None, *, pack: bool) -> Gated:
    if pack:
        return make_gated(weight, bias)
    return SplitGated(PlainLinear(weight, bias), weight.shape[0] // 2)


def _bias(linear: Any) -> Tensor | None:
    return None if linear.bias is None else linear.bias.data


def _check_linear(linear: Any, kind: type) -> None:
    found = type(linear)
    if found is not kind:
        raise NotFlat(f"linear {found.__name__}")
    if type(linear.quant_method) is not UnquantizedLinearMethod:
        raise NotFlat(f"linear with {type(linear.quant_method).__name__}")
    if linear.skip_bias_add:
        raise NotFlat("linear that hands its bias on")


def _check_norm(norm: Any) -> None:
    if norm.__class__ is not RMSNorm or not is_plain_norm(norm):
        raise NotFlat(f"norm {type(norm).__name__}")


def _check_mlp(mlp: Any) -> None:
    if type(mlp) not in (LlamaMLP, Qwen2MLP) or type(mlp.act_fn) is not SiluAndMul:
        raise NotFlat(f"MLP {type(mlp).__name__}")
    if mlp.dual_gemm.mode is not None or mlp.activation_quant.enabled:
        raise NotFlat("MLP with a fused kernel of its own")


def _read_qk_norm(attention: Any) -> tuple[Tensor | None, float]:
    if not hasattr(attention, "q_norm"):
        return None, 0.0
    q_norm, k_norm = attention.q_norm, attention.k_norm
    _check_norm(q_norm)
    _check_norm(k_norm)
    if q_norm.variance_epsilon != k_norm.variance_epsilon:
        raise NotFlat("query and key norms with different eps")
    q = q_norm.weight.data.expand(attention.num_heads, -1)
    k = k_norm.weight.data.expand(attention.num_kv_heads, -1)
    return torch.cat((q, k)), q_norm.variance_epsilon
