"""Qwen2 targets hand their layer outputs to DFLASH and DSPARK drafts."""

from __future__ import annotations

from typing import Any

from sglang_ext.patches.ledger import Kind, Patch, Stage, Where


def _set_layers(self: Any, layer_ids: list[int]) -> None:
    """Capture the output of each layer: SGLang records what enters the layer after it."""
    self.set_eagle3_layers_to_capture(layer_ids)


def _apply() -> None:
    from sglang.srt.models.qwen2 import Qwen2ForCausalLM

    if not hasattr(Qwen2ForCausalLM, "set_dflash_layers_to_capture"):
        Qwen2ForCausalLM.set_dflash_layers_to_capture = _set_layers


PATCH = Patch(
    name="qwen2-capture",
    target="sglang.srt.models.qwen2:Qwen2ForCausalLM.set_eagle3_layers_to_capture",
    kind=Kind.ADD,
    where=Where.ANY,
    stage=Stage.WORKER,
    why="the Qwen2 model records layer outputs for EAGLE-3 but has no DFLASH entry point",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/qwen2.py",
    signature="(self, layer_ids: Optional[List[int]] = None)",
    until="Qwen2ForCausalLM has set_dflash_layers_to_capture",
    apply=_apply,
)
