"""A user's data set for `bench_serving`, looked through before a server is started for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sglang_ext.lossless.errors import CannotTest


@cache
def conversations_in(path: Path) -> int:
    """How many requests the file holds: conversations of at least two turns.

    A `.json` is ShareGPT's list, any other file one conversation a line.

    Raises:
        CannotTest: a file or an entry that the tool would stumble over or pass over in silence.
    """
    is_list = path.suffix == ".json"
    turns_are_in = ("value",) if is_list else ("content", "value")
    found = sum(_is_request(path, at, entry, turns_are_in) for at, entry in _entries(path, is_list))
    if not found:
        raise _refused(path, "a conversation of two turns or more", "none")
    return found


def _entries(path: Path, is_list: bool) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _refused(path, "a text file", error) from error
    if is_list:
        entries = _json(path, "", text)
        if not isinstance(entries, list):
            raise _refused(path, "a list of conversations", type(entries).__name__)
        yield from ((f", entry {n}", entry) for n, entry in enumerate(entries, start=1))
        return
    for n, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f", line {n}", _json(path, f", line {n}", line)


def _json(path: Path, at: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, "JSON", error, at) from error


def _is_request(path: Path, at: str, entry: Any, names: tuple[str, ...]) -> bool:
    """The tool leaves out what has fewer than two turns, and reads the first two."""
    turns = None
    if isinstance(entry, dict):
        turns = entry.get("conversations", entry.get("conversation", []))
    if not isinstance(turns, list):
        raise _refused(path, "an object with conversations, a list of turns", entry, at)
    for turn in turns[:2]:
        said = None
        if isinstance(turn, dict):
            said = next((turn[name] for name in names if name in turn), None)
        if not isinstance(said, str):
            raise _refused(path, f"turns with a text in {' or '.join(names)}", turn, at)
    return len(turns) >= 2


def _refused(path: Path, expected: str, found: object, at: str = "") -> CannotTest:
    return CannotTest(
        f"--dataset {path}{at}", expected=expected, found=found,
        remedy="Use ShareGPT's form in a .json, or one conversation a line in a .jsonl.",
    )  # fmt: skip
