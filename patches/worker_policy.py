"""Whose speculative worker runs on a CUDA machine, by SGLANG_EXT_SPEC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Where

_TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    from sglang_ext.srt.spec.policy import ours_for

    ours = ours_for(algorithm.name, server_args)
    return original(algorithm, server_args) if ours is None else ours


def _apply() -> None:
    hook(_TARGET, _create_worker, Kind.AROUND)


PATCH = Patch(
    name="worker-policy",
    target="sglang.srt.speculative.spec_info:SpeculativeAlgorithm.create_worker",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="only out-of-tree platforms are asked for a worker; on CUDA the choice has no seam",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/"
    "spec_info.py",
    signature="(self, server_args: 'ServerArgs') -> "
    "'Optional[Union[Type[BaseSpecWorker], Type[TpModelWorker], Type[NGRAMWorker]]]'",
    until="create_worker consults plugins on every device",
    apply=_apply,
)
