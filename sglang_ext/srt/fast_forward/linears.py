"""Packed weights behind SGLang's own layers, through the method object that each layer calls.

SGLang   layer.quant_method.apply(layer, x, bias) -> [rows, out]
kernel   PackedLinear(weight, bias)(x)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from sglang_ext.kernels.linear import PackedLinear, can_pack


def _product(packed: PackedLinear, x: Tensor) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], packed.out_features)
    return packed(rows).view(*x.shape[:-1], packed.out_features)


class PackedLinearMethod(UnquantizedLinearMethod):
    """An unquantised layer's method once its weight is packed."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        self.packed = PackedLinear(weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != layer.weight.dtype:
            return super().apply(layer, x, bias)
        out = _product(self.packed, x)
        return out if bias is None else out.add_(bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """An output head's method; rows of a tied table are still looked up in the original."""

    def __init__(self, weight: Tensor) -> None:
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        self.packed, self._source = PackedLinear(weight), weight.data_ptr()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # A draft may have been given its target's head since.
        if layer.weight.data_ptr() != self._source:
            self.pack(layer.weight)
        out = _product(self.packed, x.to(layer.weight.dtype))
        return out if bias is None else out.add_(bias)


def pack_linears(model: nn.Module, *, skip: frozenset[nn.Module]) -> tuple[int, dict[str, int]]:
    """Pack every layer that is exactly what SGLang builds for unquantised weights.

    Returns the number of layers packed and, by reason, of those left.
    """
    packed, left = 0, Counter[str]()
    for module in model.modules():
        if not isinstance(module, LinearBase) or module in skip:
            continue
        reason = _why_not(module)
        if reason is None:
            module.quant_method = PackedLinearMethod(module.weight)
            packed += 1
        else:
            left[reason] += 1
    return packed + _pack_head(model), dict(left)


def _why_not(layer: Any) -> str | None:
    method = type(layer.quant_method)
    if method is not UnquantizedLinearMethod:
        return f"linear with {method.__name__}"
    if not can_pack(layer.weight):
        return f"{str(layer.weight.dtype).removeprefix('torch.')} linear"
    return None


def _pack_head(model: Any) -> int:
    head = getattr(model, "lm_head", None)
    processor = getattr(model, "logits_processor", None)
    if not isinstance(head, VocabParallelEmbedding) or processor is None:
        return 0
    plain = type(head.quant_method) is UnquantizedEmbeddingMethod and can_pack(head.weight)
    # In these modes SGLang computes logits in another dtype than the weight's.
    if not plain or processor.use_fp32_lm_head or processor.rl_on_policy_target is not None:
        return 0
    head.quant_method = PackedHeadMethod(head.weight)
    return 1


def repack(model: Any) -> None:
    """Pack again what `pack_linears` packed."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, PackedLinearMethod | PackedHeadMethod):
            method.pack(module.weight)
