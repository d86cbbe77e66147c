"""Defaults that a plain CPU needs: attention backend, sampler, thread binding, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import register_resolution
from sglang_ext.patches.ledger import Kind, Patch, Where


def _resolve_cpu(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_ext.srt.cpu_args import resolve_cpu_defaults

    resolve_cpu_defaults(server_args)
    previous(server_args)


PATCH = Patch(
    name="cpu-defaults",
    target="sglang.srt.arg_groups.platform_hook:handle_cpu_backends",
    kind=Kind.RESOLUTION,
    where=Where.CPU,
    why="SGLang's default (intel_amx) needs its AMX library; ranks need thread sets and a share "
    "of memory that the user should not have to work out; a server whose rank died waits a minute "
    "for dumps of GPUs",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(server_args: 'Any')",
    until="SGLang's CPU engine runs without AMX and sizes itself per rank",
    apply=register_resolution("handle_cpu_backends", _resolve_cpu),
)
