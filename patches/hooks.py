"""Function hooks: registered with SGLang's own registry, and checked to have taken effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.ledger import Kind, MovedTargetError

_registered: list[str] = []


def hook(target: str, function: Callable[..., Any], kind: Kind) -> None:
    """Register `function` on the dotted `target`; it takes effect in `settle`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType[kind.name])
    _registered.append(target)


def register_resolution(step: str, function: Callable[..., None]) -> Callable[[], None]:
    """What puts `function(server_args, previous)` around one step of SGLang's own resolution."""

    def apply() -> None:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(step)(function)

    return apply


def settle() -> None:
    """Apply what was registered; raise where SGLang logged a failure and went on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    failed = [target for target in _registered if target not in HookRegistry._patched]
    if failed:
        raise MovedTargetError(
            f"sglang-ext: hooks that could not be applied: {', '.join(failed)}. "
            "See the log above for the cause; install the pinned SGLang."
        )
