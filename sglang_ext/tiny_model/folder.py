"""Whose checkpoint a folder holds: one that is not ours is never written over."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_ext.inputs import InputError, output_folder

# A field of config.json that no reader of the model looks at.
MARK = {"sglang_ext_tiny_model": True}
WEIGHTS = "model.safetensors"


def own_folder(option: str, path: Path) -> Path:
    """The folder, made where it is not there.

    Raises:
        InputError: it cannot be made, or holds a checkpoint that `sglang-ext tiny-model` did not
            write.
    """
    config = path / "config.json"
    ours = config.is_file() and _is_marked(config)
    weights = sorted(
        file for file in path.glob("*.safetensors") if file.name != WEIGHTS or not ours
    )
    others = weights if ours or not config.exists() else [config, *weights]
    if others:
        raise InputError(
            option,
            expected="a folder without a checkpoint, or with an earlier one of tiny-model",
            found=others[0],
            remedy="Name another folder, or empty this one.",
        )
    return output_folder(option, path)


def _is_marked(config: Path) -> bool:
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and MARK.items() <= found.items()
