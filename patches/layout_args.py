"""Parallel layouts are checked on a CPU before SGLang resolves them, and again at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import register_resolution
from sglang_ext.patches.ledger import Kind, Patch, Where


def _check(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_ext.srt.parallel.layout_args import check_layout

    check_layout(server_args)
    previous(server_args)


def _check_limit(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_ext.srt.parallel.layout_args import check_exchange_limit

    previous(server_args)
    check_exchange_limit(server_args)


PATCH = Patch(
    name="layout-check",
    target="sglang.srt.arg_groups.parallel_hook:handle_data_parallelism",
    kind=Kind.RESOLUTION,
    where=Where.CPU,
    why="SGLang refuses, or fails in, layouts by what CUDA libraries can do; a layout that cannot "
    "be exact here has to be refused by its flags, before a rank starts",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(server_args: 'Any')",
    until="platforms declare the layouts they serve",
    apply=register_resolution("handle_data_parallelism", _check),
)

LIMIT_PATCH = Patch(
    name="exchange-limit",
    target="sglang.srt.arg_groups.speculative_hook:handle_speculative_decoding",
    kind=Kind.RESOLUTION,
    where=Where.CPU,
    why="low-latency exchange holds a fixed number of rows per rank; running requests, draft "
    "length and the limit are three settings that must fit",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(server_args: 'ServerArgs') -> 'None'",
    until="SGLang checks the three against each other",
    apply=register_resolution("handle_speculative_decoding", _check_limit),
)
