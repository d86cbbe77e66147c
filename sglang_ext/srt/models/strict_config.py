"""Reading config.json strictly: a field is as expected, or an error names it.

Each model has an error class of its own, so that a message says which model's file to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_VARIANT = "Other variants of this architecture are not implemented."
MISSING = object()


class ConfigFieldError(ValueError):
    """A field of config.json that cannot be served as it stands.

    title: what messages call the model. compare: where to look when no remedy is given.
    """

    title = ""
    compare = ""

    def __init__(
        self, field: str, *, expected: str, found: object, remedy: str | None = None
    ) -> None:
        shown = "nothing" if found is MISSING else repr(found)
        super().__init__(
            f"{self.title} config.json, {field}: expected {expected}, found {shown}. "
            f"{remedy or self.compare}"
        )
        self.field = field


class Fields:
    """The fields of one config.json; what is not as expected raises `error`."""

    def __init__(self, raw: Mapping[str, Any], error: type[ConfigFieldError]) -> None:
        self.raw, self.error = raw, error

    def get(self, field: str) -> Any:
        return self.raw.get(field, MISSING)

    def integer(self, field: str, least: int = 1) -> int:
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(field, expected=f"a whole number, at least {least}", found=value)
        return value

    def number(self, field: str) -> float:
        return self.positive(field, self.get(field))

    def positive(self, name: str, value: object) -> float:
        """`value`, found somewhere inside the file under `name`, as a positive number."""
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not 0 < value < float("inf"):  # type: ignore[operator]
            raise self.error(name, expected="a positive number", found=value)
        return float(value)  # type: ignore[arg-type]

    def optional(self, field: str, default: int) -> int:
        """A whole number from 0 up; `default` where the file has none, or null."""
        return default if self.raw.get(field) is None else self.integer(field, 0)

    def record(self, name: str, value: object) -> Mapping[str, Any]:
        """`value`, found under `name`, as fields; none where the file has null."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, expected="an object of fields", found=value)
        return value

    def flag(self, field: str) -> bool:
        value = self.get(field)
        if not isinstance(value, bool):
            raise self.error(field, expected="true or false", found=value)
        return value

    def only(self, field: str, *allowed: object) -> None:
        """Refuse a field that is there with another value than those this package computes."""
        value = self.raw.get(field, allowed[0])
        if value not in allowed:
            raise self.error(
                field,
                expected=" or ".join(repr(a) for a in allowed),
                found=value,
                remedy=OTHER_VARIANT,
            )

    def fp8_block(self, give_instead: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None for a checkpoint that is not quantised.

        give_instead: checkpoints to name where the format is another.
        """
        name = "quantization_config"
        quantisation = self.record(name, self.raw.get(name))
        if not quantisation:
            return None
        method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
        sizes = list(block) if isinstance(block, list | tuple) else []
        known = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
        if method != "fp8" or quantisation.get("fmt", "e4m3") != "e4m3" or not known:
            raise self.error(
                name,
                expected="quant_method fp8, fmt e4m3 and a weight_block_size of two numbers",
                found=dict(quantisation),
                remedy=f"Other formats are not implemented; give the {give_instead} checkpoint.",
            )
        return sizes[0], sizes[1]
