"""Tokens behind a stop are not counted as reasoning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.managers.schedule_batch"


def _cut(original: Callable[[Any, int], None], req: Any, new_accepted_len: int = 1) -> None:
    original(req, new_accepted_len)
    if req.finished_len is not None:
        # Reasoning begins with the answer, so no more of it than the answer is left.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


PATCH = Patch(
    name="reasoning-count",
    target=f"{_MODULE}:Req.update_finish_state",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.WORKER,
    why="the tokens of a round are counted as reasoning before the stop among them is found, so "
    "that usage may report more reasoning tokens than tokens",
    upstream="https://github.com/sgl-project/sglang/issues/39826",
    signature="(self, new_accepted_len: 'int' = 1)",
    until="reasoning is counted after the finish state is known",
    apply=lambda: hook(f"{_MODULE}.Req.update_finish_state", _cut, Kind.AROUND),
)
