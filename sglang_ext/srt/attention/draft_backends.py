"""DraftBackendFactory._create_backend with one more entry in its table.

    SGLang   create_backend(backend_name, backend_map, error_template, stamps_children)
The map goes from a backend's name to a function that returns (name, backend); per-step containers
are the ones whose children are stamped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.srt.attention import PORTABLE, create_portable


def create_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """The factory's own method, offered `portable` as well."""

    def portable() -> tuple[str, Any]:
        from sglang_ext.srt.attention.portable import PortableMultiStepDraftBackend
        from sglang_ext.srt.attention.slot_backend import SlotChainBackend
        from sglang_ext.srt.models.claims import claim_of

        runner, steps = factory.draft_model_runner, factory.speculative_num_steps
        if not stamps_children:
            return PORTABLE, create_portable(runner)
        claim = claim_of(runner.model_config.hf_config)
        if claim is not None:
            return PORTABLE, SlotChainBackend(claim.backend_class, runner, steps)
        return PORTABLE, PortableMultiStepDraftBackend(runner, factory.topk, steps)

    return original(
        factory, backend_name, {**backend_map, PORTABLE: portable}, error_template, stamps_children
    )
