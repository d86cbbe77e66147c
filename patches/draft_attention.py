"""SGLang's own autoregressive drafts (EAGLE, EAGLE3, NEXTN, STANDALONE) on backend `portable`."""

from __future__ import annotations

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_FACTORY = "sglang.srt.speculative.draft_utils"


def _apply() -> None:
    from sglang_ext.srt.attention.draft_backends import create_backend

    hook(f"{_FACTORY}.DraftBackendFactory._create_backend", create_backend, Kind.AROUND)


PATCH = Patch(
    name="draft-attention-backend",
    target=f"{_FACTORY}:DraftBackendFactory._create_backend",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="the factory knows a fixed set of backends and refuses every other name",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/"
    "draft_utils.py",
    signature="(self, backend_name: str, backend_map: dict, error_template: str, "
    "stamps_children: bool = False)",
    until="the factory asks a registry for its draft backends",
    apply=_apply,
)
