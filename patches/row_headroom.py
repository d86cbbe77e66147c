"""A request's row of slot indices gets room for all that a decode step reserves."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Where

_MODULE = "sglang.srt.mem_cache.allocation_sizing"


def _with_room_for_reserve(original: Callable[[], int]) -> int:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm is None:
        return original()
    return max(original(), 4 + get_alloc_reserve_per_decode())


def _apply() -> None:
    hook(f"{_MODULE}.get_req_to_token_extra_context_len", _with_room_for_reserve, Kind.AROUND)


PATCH = Patch(
    name="row-headroom",
    target=f"{_MODULE}:get_req_to_token_extra_context_len",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="with page size 1 a row holds context + 4 + n slots while a step reserves 2n, so a "
    "request that reaches the context limit writes into its neighbour's row and leaks slots",
    upstream="https://github.com/sgl-project/sglang/issues/33579",
    signature="() -> 'int'",
    until="issue 33579 is fixed in the pinned version",
    apply=_apply,
)
