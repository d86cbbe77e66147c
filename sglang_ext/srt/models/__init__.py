"""Model files of ours, and the architectures they answer for."""

from __future__ import annotations


def register() -> None:
    """Make SGLang's registry resolve dense draft architectures to our files."""
    from sglang.srt.models.registry import ModelRegistry

    from sglang_ext.core.spec.draft_config import BUNDLED_V4
    from sglang_ext.srt.models.deepseek_v4_dspark import DeepseekV4DSparkDraft
    from sglang_ext.srt.models.dflash import DFlashDraft
    from sglang_ext.srt.models.dspark import DSparkDraft

    for name in DFLASH_ARCHITECTURES:
        ModelRegistry.models[name] = DFlashDraft
    for name in DSPARK_ARCHITECTURES:
        ModelRegistry.models[name] = DSparkDraft
    ModelRegistry.models[BUNDLED_V4] = DeepseekV4DSparkDraft


DFLASH_ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "Qwen3DFlashModel",
)
DSPARK_ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
