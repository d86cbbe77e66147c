"""Waiting for a CUDA device that is not there becomes a no-op."""

from __future__ import annotations

from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where


def _nothing_to_wait_for(device: Any = None) -> None:
    return None


def _apply() -> None:
    hook("torch.cuda.synchronize", _nothing_to_wait_for, Kind.REPLACE)


PATCH = Patch(
    name="cuda-synchronize",
    target="torch.cuda:synchronize",
    kind=Kind.REPLACE,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="36 model files call it on every device when a draft takes over the target's embedding "
    "and head, and the expert balancer does when it moves weights; without CUDA it raises",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/"
    "glm4_moe.py",
    signature="(device: torch.device | str | int | None = None) -> None",
    until="those files ask the platform to synchronise",
    apply=_apply,
)
