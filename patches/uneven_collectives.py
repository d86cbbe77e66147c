"""Reduce-scatter and all-gather of unequal parts, where no NCCL communicator exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.distributed.parallel_state"
_UPSTREAM = (
    "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/distributed/"
    "parallel_state.py"
)


def _reduce_scatterv(
    original: Callable[..., Any],
    group: Any,
    input_: Any,
    output: Any = None,
    sizes: list[int] | None = None,
) -> Any:
    if group.pynccl_comm is not None:
        return original(group, input_, output, sizes)
    from sglang_ext.srt.parallel.collectives import reduce_scatter_parts

    return reduce_scatter_parts(group, input_, output, sizes)


def _all_gatherv(
    original: Callable[..., Any],
    group: Any,
    input_: Any,
    sizes: list[int] | None = None,
    output: Any = None,
) -> Any:
    if group.pynccl_comm is not None:
        return original(group, input_, sizes, output)
    from sglang_ext.srt.parallel.collectives import all_gather_parts

    return all_gather_parts(group, input_, sizes, output)


def _patch(method: str, function: Callable[..., Any], signature: str) -> Patch:
    return Patch(
        name=f"uneven-{method.replace('_', '-')}",
        target=f"{_MODULE}:GroupCoordinator.{method}",
        kind=Kind.AROUND,
        where=Where.CPU,
        stage=Stage.BACKEND,
        why="it uses the group's NCCL communicator without asking whether there is one",
        upstream=_UPSTREAM,
        signature=signature,
        until="the method falls back to torch.distributed",
        apply=lambda: hook(f"{_MODULE}.GroupCoordinator.{method}", function, Kind.AROUND),
    )


REDUCE_PATCH = _patch(
    "reduce_scatterv",
    _reduce_scatterv,
    "(self, input_: torch.Tensor, output: Optional[torch.Tensor] = None, "
    "sizes: Optional[List[int]] = None) -> torch.Tensor",
)
GATHER_PATCH = _patch(
    "all_gatherv",
    _all_gatherv,
    "(self, input_: Union[torch.Tensor, List[torch.Tensor]], "
    "sizes: Optional[List[int]] = None, output: Optional[torch.Tensor] = None) -> "
    "Union[torch.Tensor, List[torch.Tensor]]",
)
