"""The current CUDA stream, asked for on a machine without CUDA, is the CPU's."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where


def _current(device: Any = None) -> Any:
    return torch.cpu.current_stream()


def _apply() -> None:
    hook("torch.cuda.current_stream", _current, Kind.REPLACE)


PATCH = Patch(
    name="cuda-stream",
    target="torch.cuda:current_stream",
    kind=Kind.REPLACE,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="a prefill under context parallelism asks for it on every device before it gathers, and "
    "without CUDA that raises; the answer is passed on and not used",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
    "model_executor/runner/eager_runner.py",
    signature="(device: torch.device | str | int | None = None) -> torch.cuda.streams.Stream",
    until="the runner asks its device module for a stream",
    apply=_apply,
)
