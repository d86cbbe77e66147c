"""Context parallelism beside expert dispatch: two restrictions that our parts do not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_BOUNDARY = "sglang.srt.layers.layer_boundary"
_UPSTREAM = (
    "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/layer_boundary/"
)


def _reject(original: Callable[..., None], moe_on_local_rows: bool, cp_shards: bool) -> None:
    from sglang.srt.layers.moe import get_moe_a2a_backend

    if moe_on_local_rows and get_moe_a2a_backend().is_deepep():
        return
    original(moe_on_local_rows, cp_shards)


def _gather(original: Callable[..., Any], tensor: Any, *, owned: bool = False) -> Any:
    return original(tensor, owned=True)


def _apply_reject() -> None:
    hook(f"{_BOUNDARY}.factories._reject_unsupported_cp_moe", _reject, Kind.AROUND)


def _apply_gather() -> None:
    hook(f"{_BOUNDARY}.adapters.attention.attn_tp_gather", _gather, Kind.AROUND)


REJECT_PATCH = Patch(
    name="cp-moe-reject",
    target=f"{_BOUNDARY}.factories:_reject_unsupported_cp_moe",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="it refuses experts dispatched per DP rank under GQA context parallelism; our dispatcher "
    "takes whatever rows a rank holds, and the result equals one rank's",
    upstream=f"{_UPSTREAM}factories.py",
    signature="(moe_on_local_rows: 'bool', cp_shards: 'bool') -> 'None'",
    until="SGLang dispatches each CP rank's own rows",
    apply=_apply_reject,
)

GATHER_PATCH = Patch(
    name="attention-tp-gather",
    target=f"{_BOUNDARY}.adapters.attention:attn_tp_gather",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="under context parallelism the shared buffer it gathers into is sized for all CP ranks, "
    "and the collective refuses the length; a buffer of its own has the right one",
    upstream=f"{_UPSTREAM}adapters/attention.py",
    signature="(tensor: torch.Tensor, *, owned: bool = False) -> torch.Tensor",
    until="the shared buffer is sized for the rows at hand",
    apply=_apply_gather,
)
