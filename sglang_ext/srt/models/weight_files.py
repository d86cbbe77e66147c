"""The weight files of a checkpoint folder, looked at before anything is loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.safetensors_header import Entry, read_entries

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFileError(ValueError):
    """A weight file that is not there, or not whole."""

    def __init__(self, file: str, *, expected: str, found: object, remedy: str) -> None:
        super().__init__(
            f"target checkpoint, {file}: expected {expected}, found {found!r}. {remedy}"
        )


def check_whole(folder: Path) -> list[tuple[str, Tensor]]:
    """Every weight file of `folder` is there and as long as its header says.

    A name that is no folder is downloaded by SGLang, which checks what it gets.

    Returns:
        Name of every tensor, and the tensor without its values (on device meta).

    Raises:
        WeightFileError: the first file for which that is not so.
    """
    found: list[tuple[str, Tensor]] = []
    for file in _indexed(folder) or sorted(folder.glob("*.safetensors")):
        if not file.is_file():
            raise WeightFileError(
                file.name,
                expected=f"a file, as {_INDEX} says",
                found="none",
                remedy="Download the checkpoint again.",
            )
        entries = read_entries(file, WeightFileError)
        found += [(name, _hollow(file, name, entry)) for name, entry in entries.items()]
    return found


def _hollow(file: Path, name: str, entry: Entry) -> Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightFileError(
            f"{file.name}, {name}",
            expected=f"one of {', '.join(_DTYPES)}",
            found=entry.dtype,
            remedy="The checkpoint is of a variant that is not implemented.",
        )
    return torch.empty(entry.shape, dtype=dtype, device="meta")


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
