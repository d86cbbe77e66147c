"""`--moe-a2a-backend deepep` runs over torch.distributed where deep_ep cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_LAYER = "sglang.srt.layers.moe.ep_moe.layer"
_FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer"
_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/moe/"


def _layer_class(original: Callable[..., Any], quant_config: Any) -> Any:
    from sglang.srt.layers.moe import get_moe_a2a_backend
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.utils import is_sbo_enabled

    if not get_moe_a2a_backend().is_deepep():
        return original(quant_config)
    if not is_sbo_enabled():
        return FusedMoE
    from sglang_ext.srt.parallel.overlapped_experts import OverlappedExperts

    return OverlappedExperts


def _dispatcher(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    from sglang.srt.layers.moe import get_moe_a2a_backend

    if not get_moe_a2a_backend().is_deepep():
        return original(moe_runner_config, quant_method)
    from sglang_ext.srt.parallel.moe_dispatcher import ExchangeDispatcher

    return ExchangeDispatcher(moe_runner_config)


def _apply_layer() -> None:
    hook(f"{_LAYER}.get_moe_impl_class", _layer_class, Kind.AROUND)


def _apply_dispatcher() -> None:
    hook(f"{_FACTORY}.create_moe_dispatcher", _dispatcher, Kind.AROUND)


LAYER_PATCH = Patch(
    name="expert-layer",
    target=f"{_LAYER}:get_moe_impl_class",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="the layer class for deepep calls DeepGEMM, which needs CUDA, and single-batch overlap "
    "runs on CUDA streams",
    upstream=f"{_UPSTREAM}ep_moe/layer.py",
    signature="(quant_config: 'Optional[QuantizationConfig]')",
    until="the class for deepep has a plain torch path, and its overlap an order without streams",
    apply=_apply_layer,
)

DISPATCHER_PATCH = Patch(
    name="expert-dispatcher",
    target=f"{_FACTORY}:create_moe_dispatcher",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="the deepep dispatcher imports deep_ep, which needs CUDA and RDMA or NVLink",
    upstream=f"{_UPSTREAM}fused_moe_triton/layer.py",
    signature="(moe_runner_config: sglang.srt.layers.moe.moe_runner.base.MoeRunnerConfig, "
    "quant_method: sglang.srt.layers.quantization.base_config.FusedMoEMethodBase) -> "
    "sglang.srt.layers.moe.token_dispatcher.base.BaseDispatcher",
    until="SGLang has a dispatcher over torch.distributed, or lets plugins register one",
    apply=_apply_dispatcher,
)
