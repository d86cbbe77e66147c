"""Strict reading of one YAML or JSON mapping: nothing missing, unknown or of another type."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sglang_ext.launcher.errors import ConfigError, nearest

_MISSING = object()
# Far above every count that there is; what is larger is a slip, and overflows what reckons with it.
LARGEST = 10**9


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        ConfigError: the file is not there, does not parse, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            str(path),
            "file",
            expected="a readable YAML or JSON file",
            found=message,
            remedy="Correct the file, or name another one.",
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            str(path),
            "file",
            expected="a mapping of fields",
            found=type(loaded).__name__,
            remedy="Write `field: value` lines.",
        )
    return loaded


class Fields:
    """Typed access to the fields of one mapping.

    where: named in errors; known: every field that may occur, None for any
    """

    def __init__(self, raw: Any, where: str, known: tuple[str, ...] | None) -> None:
        self.raw, self.where = raw, where
        if not isinstance(raw, Mapping):
            raise self.error("entry", "a mapping", raw, "Write `field: value` lines.")
        if known is None:
            return
        for name in raw:
            if name not in known:
                hint = nearest(str(name), known)
                raise self.error(name, f"one of {', '.join(known)}", "an unknown field", hint)

    def error(self, field: str, expected: str, found: object, remedy: str = "") -> ConfigError:
        remedy = remedy or f"Correct `{field}`."
        return ConfigError(self.where, field, expected=expected, found=found, remedy=remedy)

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(field) is not None

    def text(self, field: str, default: Any = _MISSING) -> str:
        return str(self._typed(field, (str,), "text", default))

    def whole(
        self,
        field: str,
        default: Any = _MISSING,
        *,
        at_least: int = 0,
        at_most: int = LARGEST,
    ) -> int:
        value = self._typed(field, (int,), "a whole number", default)
        if value is not default and value < at_least:
            raise self.error(field, f"a whole number of at least {at_least}", value)
        if value is not default and value > at_most:
            raise self.error(field, f"a whole number of at most {at_most}", value)
        return int(value)

    def number(self, field: str, default: Any = _MISSING) -> float:
        value = self._typed(field, (int, float), "a number", default)
        if value is not default and not 0 <= value <= sys.float_info.max:
            raise self.error(field, "a finite number of at least 0", value)
        return float(value)

    def flag(self, field: str, default: Any = _MISSING) -> bool:
        return bool(self._typed(field, (bool,), "true or false", default))

    def names(self, field: str, default: Any = _MISSING) -> tuple[str, ...]:
        value = self._typed(field, (list,), "a list of names", default)
        if not all(isinstance(item, str) for item in value):
            raise self.error(field, "a list of names", value)
        return tuple(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        value = self._typed(field, (list,), "a list of numbers", _MISSING)
        if not all(
            isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= sys.float_info.max
            for v in value
        ):
            raise self.error(field, "a list of numbers", value)
        return tuple(float(item) for item in value)

    def mapping(self, field: str, default: Any = _MISSING) -> dict[str, Any]:
        return dict(self._typed(field, (dict,), "a mapping", default))

    def one_of(self, field: str, allowed: tuple[str, ...]) -> str:
        value = self.text(field)
        if value not in allowed:
            raise self.error(field, f"one of {', '.join(allowed)}", value, nearest(value, allowed))
        return value

    def _typed(self, field: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.raw.get(field, _MISSING)
        if value is _MISSING:
            if default is _MISSING:
                raise self.error(field, what, "nothing", f"Add `{field}`.")
            return default
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if wrong_bool or not isinstance(value, kinds):
            raise self.error(field, what, value)
        return value
