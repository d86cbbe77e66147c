"""What a request asks of speculation is checked when it arrives, not when it is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.speculative.dflash_utils"


def _validate(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    from sglang_ext.srt.spec.request_options import request_error

    return request_error(req) or original(req, enable_overlap)


def _apply() -> None:
    hook(f"{_MODULE}.validate_dflash_request", _validate, Kind.AROUND)


PATCH = Patch(
    name="request-options",
    target=f"{_MODULE}:validate_dflash_request",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.WORKER,
    why="custom_params.speculative and custom_params.gamma are ours; what our worker cannot return "
    "(hidden states, sampling masks) is refused instead of left out",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/"
    "dflash_utils.py",
    signature="(req: 'Req', enable_overlap: 'bool') -> 'Optional[str]'",
    until="workers have a request validation method of their own",
    apply=_apply,
)
