"""SGLang's own forward back in every part of an optimised model, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

from sglang_ext.srt.fast_forward.linears import PackedHeadMethod, PackedLinearMethod


@contextmanager
def stock(model: Any) -> Iterator[None]:
    flat = model.model.__dict__.pop("forward", None)
    methods: list[tuple[Any, Any]] = []
    ops = [module for module in model.modules() if isinstance(module, BaseFusedOp)]
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, PackedLinearMethod):
            methods.append((module, method))
            module.quant_method = UnquantizedLinearMethod()
        elif isinstance(method, PackedHeadMethod):
            methods.append((module, method))
            module.quant_method = UnquantizedEmbeddingMethod()
    for op in ops:
        op._forward_method = op.forward_native
    try:
        yield
    finally:
        if flat is not None:
            model.model.forward = flat
        for module, method in methods:
            module.quant_method = method
        for op in ops:
            op._forward_method = None
