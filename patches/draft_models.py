"""Draft architectures resolve to our model files where our worker runs."""

from __future__ import annotations

from sglang_ext.patches.ledger import Kind, Patch, Stage, Where


def _apply() -> None:
    from sglang_ext.srt.models import register

    register()


PATCH = Patch(
    name="draft-models",
    target="sglang.srt.models.registry:ModelRegistry.models",
    kind=Kind.REGISTER,
    where=Where.ANY,
    stage=Stage.WORKER,
    why="SGLang's draft model files call CUDA JIT and Triton kernels for bf16 and skip tensors "
    "they do not know",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="data",
    until="SGLang's draft files run in plain torch and refuse what they cannot use",
    apply=_apply,
)
