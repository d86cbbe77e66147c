"""The weight files of a checkpoint folder, looked at before anything is loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_ext.core.safetensors_header import read_header

_INDEX = "model.safetensors.index.json"


class WeightFileError(ValueError):
    """A weight file that is not there, or not whole."""

    def __init__(self, file: str, *, expected: str, found: object, remedy: str) -> None:
        super().__init__(
            f"target checkpoint, {file}: expected {expected}, found {found!r}. {remedy}"
        )


def check_whole(folder: Path) -> None:
    """Every weight file of `folder` is there and as long as its header says.

    A name that is no folder is downloaded by SGLang, which checks what it gets.

    Raises:
        WeightFileError: the first file for which that is not so.
    """
    for file in _indexed(folder) or sorted(folder.glob("*.safetensors")):
        if not file.is_file():
            raise WeightFileError(
                file.name,
                expected=f"a file, as {_INDEX} says",
                found="none",
                remedy="Download the checkpoint again.",
            )
        read_header(file, WeightFileError)


def _indexed(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return []
    try:
        content: Any = json.loads(index.read_text())
        return [folder / name for name in sorted(set(content["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(
            _INDEX,
            expected="JSON with a weight_map",
            found=str(error),
            remedy="Download it again.",
        ) from error
