"""`--attention-backend portable` becomes a value SGLang accepts, for targets and drafts."""

from __future__ import annotations

from sglang_ext.patches.ledger import Kind, Patch, Where

_NAME = "portable"
_CHOICES = "sglang.srt.arg_groups.choices"


def _add_target_choice() -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )

    if _NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([_NAME])


def _add_draft_choice() -> None:
    from sglang.srt.arg_groups.choices import (
        DRAFT_ATTENTION_BACKEND_CHOICES,
        add_draft_attention_backend_choices,
    )

    if _NAME not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([_NAME])


def _register_backend() -> None:
    from sglang_ext.srt import attention

    attention.register()


PATCH = Patch(
    name="attention-choice",
    target=f"{_CHOICES}:add_attention_backend_choices",
    kind=Kind.REGISTER,
    where=Where.ANY,
    why="names our attention backend; SGLang's own need CUDA or read lengths a verify lacks",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(iterable, /)",
    until="SGLang ships an attention backend that runs every mode on any device",
    apply=_add_target_choice,
)

DRAFT_PATCH = Patch(
    name="draft-attention-choice",
    target=f"{_CHOICES}:add_draft_attention_backend_choices",
    kind=Kind.REGISTER,
    where=Where.ANY,
    why="without it the draft worker falls back to flashinfer, which needs CUDA",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(iterable, /)",
    until="the draft worker asks the platform for its default backend",
    apply=_add_draft_choice,
)

BACKEND_PATCH = Patch(
    name="attention-backend",
    target="sglang.srt.layers.attention.attention_registry:register_attention_backend",
    kind=Kind.REGISTER,
    where=Where.ANY,
    why="the backend behind the name",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(name)",
    until="SGLang ships an attention backend that runs every mode on any device",
    apply=_register_backend,
)
