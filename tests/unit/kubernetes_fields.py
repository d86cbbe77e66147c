"""What in a manifest is none of LeaderWorkerSet's and Kubernetes' fields, or of another type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

FORMS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
# The pattern that the CRD gives for its quantities.
_QUANTITY = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?(\d+(\.\d*)?|\.\d+)))?"
)


def _is_integer(value: Any) -> bool:
    return type(value) is int


_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number or text": lambda value: _is_integer(value) or isinstance(value, str),
    "quantity": lambda value: (
        _is_integer(value) or (isinstance(value, str) and bool(_QUANTITY.fullmatch(value)))
    ),
    "object": lambda _: False,
}


def misfits(value: Any, form: Any, at: str = "") -> Iterator[str]:
    """One line per field that is missing, unknown or of another type."""
    if isinstance(form, dict):
        yield from _of_mapping(value, form, at)
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{at}: expected a list, found {value!r}"
            return
        for place, item in enumerate(value):
            yield from misfits(item, form[0], f"{at}/{place}")
    elif form.startswith("="):
        yield from misfits(value, FORMS[form[1:]], at)
    elif not _holds(value, form):
        yield f"{at}: expected {form}, found {value!r}"


def _of_mapping(value: Any, form: dict[str, Any], at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: expected a mapping, found {value!r}"
        return
    known = {name.removesuffix("!"): inner for name, inner in form.items()}
    for name in form:
        if name.endswith("!") and name.removesuffix("!") not in value:
            yield f"{at}/{name.removesuffix('!')}: missing"
    for name, inner in value.items():
        if name not in known and "*" not in known:
            yield f"{at}/{name}: unknown"
        else:
            yield from misfits(inner, known.get(name, known.get("*")), f"{at}/{name}")


def _holds(value: Any, form: str) -> bool:
    if form in _TYPES:
        return _TYPES[form](value)
    if bounds := re.fullmatch(r"integer (\d+) to (\d+)", form):
        return _is_integer(value) and int(bounds[1]) <= value <= int(bounds[2])
    return value in form.split(" | ")
