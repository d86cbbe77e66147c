"""What a safetensors file says that it holds, read without its tensors.

Format: an 8-byte little-endian length, a JSON header of that length, the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One tensor: its type as the format spells it (F32, F8_E4M3, ...), and its shape."""

    dtype: str
    shape: Shape


def read_header(file: Path, error: Callable[..., Exception]) -> dict[str, Shape]:
    """Name to shape of every tensor in one file; raises `error` when it is not whole."""
    return {name: entry.shape for name, entry in read_entries(file, error).items()}


def read_entries(file: Path, error: Callable[..., Exception]) -> dict[str, Entry]:
    """Name to type and shape of every tensor in one file; raises `error` when it is not whole.

    error: takes the file's name, and expected, found and remedy by keyword.
    """

    def broken(expected: str, found: str) -> Exception:
        return error(file.name, expected=expected, found=found, remedy="Download the file again.")

    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise broken("a safetensors header", f"{size} bytes")
        raw = handle.read(length)
    try:
        header: Any = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        found = {n: Entry(str(e["dtype"]), tuple(map(int, e["shape"]))) for n, e in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as cause:
        raise broken("a safetensors header", repr(cause)) from cause
    if size != 8 + length + end:
        raise broken(f"{8 + length + end} bytes", f"{size} bytes")
    return found
