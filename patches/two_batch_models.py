"""`--enable-two-batch-overlap` asks a model of ours for the operations of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_TARGET = "sglang.srt.batch_overlap.operations_strategy"


def _strategy(original: Callable[..., Any], layers: Any, forward_mode: Any) -> Any:
    if not hasattr(layers[0], "in_halves"):
        return original(layers, forward_mode)
    from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy

    return OperationsStrategy.concat([layer.in_halves(forward_mode) for layer in layers])


PATCH = Patch(
    name="two-batch-models",
    target=f"{_TARGET}:OperationsStrategy.init_new_tbo",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="it knows layers by the names of SGLang's own classes",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/batch_overlap/"
    "operations_strategy.py",
    signature="(layers: torch.nn.modules.container.ModuleList, forward_mode: "
    "sglang.srt.model_executor.forward_batch_info.ForwardMode) -> 'OperationsStrategy'",
    until="a layer class may bring its own strategy",
    apply=lambda: hook(f"{_TARGET}.OperationsStrategy.init_new_tbo", _strategy, Kind.AROUND),
)
