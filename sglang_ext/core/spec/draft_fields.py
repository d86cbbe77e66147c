"""Fields of a draft checkpoint's config.json: where they stand, and the error that names one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DraftConfigError(ValueError):
    """A field of a draft checkpoint cannot be used."""

    def __init__(self, field: str, *, expected: str, found: object, remedy: str) -> None:
        super().__init__(
            f"draft checkpoint, {field}: expected {expected}, found {found!r}. {remedy}"
        )
        self.field = field


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a local checkpoint folder."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise DraftConfigError(
            "config.json",
            expected=f"a file {file}",
            found="nothing there",
            remedy="Point --speculative-draft-model-path at a draft checkpoint folder.",
        )
    try:
        loaded = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DraftConfigError(
            "config.json", expected="JSON", found=str(error), remedy="Download the draft again."
        ) from error
    if not isinstance(loaded, dict):
        raise DraftConfigError(
            "config.json", expected="an object", found=loaded, remedy="Download the draft again."
        )
    return loaded


class FieldReader:
    """Looks a key up in the nested `dspark_config` / `dflash_config` first, then at top level."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.layers: list[Mapping[str, Any]] = [
            nested
            for key in ("dspark_config", "dflash_config")
            if isinstance(nested := raw.get(key), Mapping)
        ] + [raw]

    def get(self, key: str, default: Any = None) -> Any:
        for layer in self.layers:
            if layer.get(key) is not None:
                return layer[key]
        return default

    def integer(self, key: str, *, minimum: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise DraftConfigError(
                key,
                expected=f"a whole number of at least {minimum}",
                found=value,
                remedy="Correct the draft's config.json.",
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DraftConfigError(
                key, expected="a number", found=value, remedy="Correct the draft's config.json."
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise DraftConfigError(
                key,
                expected="true or false",
                found=value,
                remedy="Correct the draft's config.json.",
            )
        return value
