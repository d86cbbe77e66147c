"""SGLang's plain-torch MoE, replaced by one that sorts tokens by expert."""

from __future__ import annotations

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_TARGET = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"


def _apply() -> None:
    from sglang_ext.srt.moe import moe_forward

    hook(_TARGET, moe_forward, Kind.REPLACE)


PATCH = Patch(
    name="moe-native",
    target="sglang.srt.layers.moe.fused_moe_native:moe_forward_native",
    kind=Kind.REPLACE,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="the original fails on expert id -1 and on an empty batch, and ignores the swiglu clamp",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/moe/"
    "fused_moe_native.py",
    signature="(layer: torch.nn.modules.module.Module, x: torch.Tensor, topk_output: "
    "sglang.srt.layers.moe.topk.StandardTopKOutput, moe_runner_config: "
    "sglang.srt.layers.moe.moe_runner.base.MoeRunnerConfig) -> torch.Tensor",
    until="the original skips id -1, accepts no rows and clamps",
    apply=_apply,
)
