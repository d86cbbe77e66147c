"""DraftBackendFactory._create_backend with one more entry in its table.

    SGLang   create_backend(backend_name, backend_map, error_template, stamps_children)
The map goes from a backend's name to a function that returns (name, backend); per-step containers
are the ones whose children are stamped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.srt.attention import PORTABLE


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
        from sglang_ext.srt.attention.portable import (
            PortableAttnBackend,
            PortableMultiStepDraftBackend,
        )

        runner = factory.draft_model_runner
        if not stamps_children:
            return PORTABLE, PortableAttnBackend(runner)
        steps = factory.speculative_num_steps
        return PORTABLE, PortableMultiStepDraftBackend(runner, factory.topk, steps)

    return original(
        factory, backend_name, {**backend_map, PORTABLE: portable}, error_template, stamps_children
    )
