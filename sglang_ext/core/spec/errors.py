"""The one shape of an error about a file: field, expected, found, remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TableError(ValueError):
    """A field of a table cannot be used.

    field: name of the offending field
    """

    def __init__(
        self, table: str, field: str, *, expected: str, found: object, remedy: str
    ) -> None:
        super().__init__(f"{table}, {field}: expected {expected}, found {found!r}. {remedy}")
        self.field = field


class TableReader:
    """Reads the fields of one JSON object, strictly: nothing missing, unknown or of another type.

    Raises TableError.
    """

    def __init__(self, table: str, path: str | Path, remedy: str) -> None:
        self.table = table
        self.remedy = remedy
        try:
            loaded = json.loads(Path(path).read_text())
        except OSError as error:
            raise self.error("file", f"a readable file {path}", str(error)) from error
        except (ValueError, RecursionError) as error:
            raise self.error("file", f"JSON in {path}", str(error)) from error
        if not isinstance(loaded, dict):
            raise self.error("file", "a JSON object", type(loaded).__name__)
        self.raw: Mapping[str, Any] = loaded

    def error(self, field: str, expected: str, found: object) -> TableError:
        return TableError(self.table, field, expected=expected, found=found, remedy=self.remedy)

    def refuse_unknown(self, known: set[str]) -> None:
        for field in self.raw:
            if field not in known:
                raise self.error(field, f"one of {', '.join(sorted(known))}", "an unknown field")

    def number(self, field: str) -> float:
        return self._as_number(field, self._get(field))

    def numbers(self, field: str) -> list[float]:
        return [self._as_number(field, value) for value in self._list(field)]

    def rectangle(self, field: str, height: int, width: int) -> tuple[tuple[float, ...], ...]:
        """[height][width] numbers."""
        rows = self._list(field)
        if len(rows) != height or not all(isinstance(r, list) and len(r) == width for r in rows):
            raise self.error(field, f"{height} lists of {width} numbers", rows)
        return tuple(tuple(self._as_number(field, value) for value in row) for row in rows)

    def whole(self, field: str) -> int:
        return self._as_whole(field, self._get(field))

    def wholes(self, field: str) -> list[int]:
        return [self._as_whole(field, value) for value in self._list(field)]

    def text(self, field: str) -> str:
        value = self._get(field)
        if not isinstance(value, str):
            raise self.error(field, "a string", value)
        return value

    def _get(self, field: str) -> Any:
        if field not in self.raw:
            raise self.error(field, "a value", "nothing")
        return self.raw[field]

    def _list(self, field: str) -> list[Any]:
        value = self._get(field)
        if not isinstance(value, list):
            raise self.error(field, "a list", value)
        return value

    def _as_number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.error(field, "numbers", value)
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise self.error(field, "numbers that a float can hold", "a larger one")
        return float(value)

    def _as_whole(self, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, "whole numbers", value)
        return value


def write_table(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Writes one JSON object."""
    Path(path).write_text(json.dumps(fields, indent=1) + "\n")
