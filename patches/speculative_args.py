"""DSPARK and DFLASH arguments are resolved by us wherever our worker will run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook, register_resolution
from sglang_ext.patches.ledger import Kind, Patch, Where

_HOOK = "sglang.srt.arg_groups.speculative_hook"


def _resolver(algorithm: str) -> Callable[[Callable[[Any], None], Any], None]:
    def resolve(original: Callable[[Any], None], server_args: Any) -> None:
        from sglang_ext.srt.args import resolve_ours

        if not resolve_ours(server_args, algorithm):
            original(server_args)

    return resolve


def _apply(handler: str, algorithm: str) -> Callable[[], None]:
    def apply() -> None:
        hook(f"{_HOOK}.{handler}", _resolver(algorithm), Kind.AROUND)

    return apply


def _read_draft_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_ext.srt.args import check_draft_is_there

    check_draft_is_there(server_args)
    previous(server_args)


DRAFT_CHECK_PATCH = Patch(
    name="draft-check",
    target=f"{_HOOK}:handle_speculative_decoding",
    kind=Kind.RESOLUTION,
    where=Where.ANY,
    why="SGLang asks transformers about the draft before its handlers run, and a folder that is "
    "missing or has no config.json ends there with a message about something else",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(server_args: 'ServerArgs') -> 'None'",
    until="SGLang reads the draft's config after the algorithm's own handler",
    apply=register_resolution("handle_speculative_decoding", _read_draft_first),
)

DSPARK_PATCH = Patch(
    name="dspark-args",
    target=f"{_HOOK}:_handle_dspark",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="SGLang refuses DSPARK off CUDA, NPU and XPU without asking the platform, and on CUDA with "
    "data-parallel attention over DeepEP or with context parallelism, which our worker takes",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/arg_groups/"
    "speculative_hook.py",
    signature="(server_args: 'ServerArgs') -> 'None'",
    until="SGLang asks the platform about DSPARK as it does about DFLASH, and drafts over DeepEP",
    apply=_apply("_handle_dspark", "DSPARK"),
)

DFLASH_PATCH = Patch(
    name="dflash-args",
    target=f"{_HOOK}:_handle_dflash",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="SGLang guesses a block of 16 when a draft's config cannot be read, and caps concurrency "
    "at 48; ours reads the draft strictly and leaves concurrency to the user; data-parallel "
    "attention is refused off CUDA and beside context parallelism, which our worker takes",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/arg_groups/"
    "speculative_hook.py",
    signature="(server_args: 'ServerArgs') -> 'None'",
    until="a draft that cannot be read is refused upstream",
    apply=_apply("_handle_dflash", "DFLASH"),
)
