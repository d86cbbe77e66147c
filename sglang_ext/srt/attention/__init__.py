"""Attention backends of this package and their registration with SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

PORTABLE = "portable"


def backend_choices() -> list[str]:
    """Names to add to SGLang's target and draft attention backend choices."""
    return [PORTABLE]


def register() -> None:
    """Enter the backends into SGLang's registry; calling it again changes nothing."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(PORTABLE)(create_portable)


def create_portable(runner: ModelRunner) -> AttentionBackend:
    """The backend that the runner's model needs; a draft beside it gets its own."""
    from sglang_ext.srt.models.claims import claim_of

    claim = claim_of(runner.model_config.hf_config)
    if claim is not None:
        backend: AttentionBackend = claim.backend_class(runner)
        return backend
    from sglang_ext.srt.attention.portable import PortableAttnBackend

    return PortableAttnBackend(runner)
