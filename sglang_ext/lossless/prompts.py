"""What the checker asks: a built-in set, or a JSONL file of the user's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.types import Prompt

KINDS = ("code", "math", "chat", "languages", "structure", "edge", "long")

_CODE = (
    "def is_prime(n: int) -> bool:\n",
    "Write a Python function that merges two sorted lists.\n\n```python\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT customer_id, SUM(amount) AS total\nFROM orders\nWHERE",
    "fn fibonacci(n: u64) -> u64 {\n    match n {\n",
    "// Reverse a string in JavaScript\nfunction reverse(text) {\n",
    "import numpy as np\n\ndef softmax(x, axis=-1):\n",
    "#!/bin/bash\n# Delete log files older than seven days\n",
    "The following function counts words in a file:\n\ndef count_words(path):\n    counts = {}\n",
)
_MATH = (
    "Question: A train covers 180 km in 2 hours and 15 minutes. What is its speed?\nAnswer:",
    "Compute step by step: 37 * 48 =",
    "If 3x + 7 = 31, then x =",
    "The first twelve prime numbers are 2, 3, 5,",
    "Question: Maria has 5 boxes with 12 pencils each and gives 17 away. How many now?\nAnswer:",
    "The derivative of x^3 + 2x^2 - 5x + 1 is",
    "The sum of the integers from 1 to 100 is",
    "Convert 0.375 to a fraction in lowest terms:",
    "1, 1, 2, 3, 5, 8, 13,",
)
_CHAT = (
    "What is the difference between a virus and a bacterium?",
    "Plan a three-day trip to Lisbon for a family with two children.",
    "Give me five tips for a job interview, as a numbered list.",
    "Explain how a refrigerator works to a ten-year-old.",
    "Write a short poem about the sea in winter.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Which is better for a beginner, the guitar or the piano? Choose one and say why.",
    "Draft a polite email that declines a meeting on Friday.",
    "List the planets of the solar system with one fact about each.",
)
_LANGUAGES = (
    "Die Hauptstadt von Frankreich ist",
    "Il était une fois, dans un petit village,",
    "El agua hierve a una temperatura de",
    "今日の天気はとても良いので、",
    "人工智能的发展历史可以追溯到",
    "Москва является столицей",
    "اللغة العربية هي",
    "सूर्य पूर्व दिशा में",
    "서울은 대한민국의",
    "Η Αθήνα είναι η πρωτεύουσα",
)
_STRUCTURE = (
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "name,age,city\nAlice,31,Paris\nBob,27,Rome\n",
    "<ul>\n  <li>Apples</li>\n  <li>",
    "| country | capital |\n|---|---|\n| Italy | Rome |\n| Spain |",
    "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web\nspec:\n",
    "2024-01-01 00:00:01 INFO start\n2024-01-01 00:00:02 INFO load\n2024-01-01 00:00:03",
    "# Installation\n\n1. Download the archive\n2.",
)
_EDGE = (
    "A",
    "\n",
    "the the the the the the the the",
    "abababababababababab",
    "0000000000000001 0000000000000010 0000000000000011",
    "!!!???...,,,;;;:::",
    "Yes or no: is seven an odd number? Answer with one word:",
)


def _records(seed: int, lines: int) -> str:
    rng = random.Random(seed)
    rows = [
        f"Record {n}: account {rng.randrange(10**8):08d}, balance {rng.randrange(10**5)}"
        for n in range(lines)
    ]
    wanted = rng.randrange(lines)
    return "\n".join([*rows, f"\nThe account number of record {wanted} is"])


def _story(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    who, what = ("The captain", "A sailor", "The cook", "My uncle"), ("saw", "lost", "sold", "drew")
    things = ("a map", "the old clock", "two lanterns", "an island", "the red boat")
    return " ".join(
        f"{rng.choice(who)} {rng.choice(what)} {rng.choice(things)}." for _ in range(sentences)
    )


def _long() -> tuple[str, ...]:
    """About 2,000 to 8,000 characters, of different lengths on purpose."""
    records = [_records(n, lines) for n, lines in enumerate((40, 67, 131))]
    return (*records, *(_story(n, count) for n, count in enumerate((90, 157))))


def builtin(kinds: Sequence[str] = KINDS) -> list[Prompt]:
    """The built-in prompts of the kinds named, in a fixed order."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise CannotTest(
            "--sets",
            expected=f"some of {', '.join(KINDS)}",
            found=unknown,
            remedy="Name known sets.",
        )
    texts: dict[str, Callable[[], tuple[str, ...]]] = {
        "code": lambda: _CODE,
        "math": lambda: _MATH,
        "chat": lambda: _CHAT,
        "languages": lambda: _LANGUAGES,
        "structure": lambda: _STRUCTURE,
        "edge": lambda: _EDGE,
        "long": _long,
    }
    return [_one(kind, n, text) for kind in kinds for n, text in enumerate(texts[kind](), start=1)]


def _one(kind: str, number: int, text: str) -> Prompt:
    if kind == "chat":
        return Prompt(f"{kind}-{number}", kind, messages=({"role": "user", "content": text},))
    return Prompt(f"{kind}-{number}", kind, text=text)


def as_text(prompt: Prompt) -> Prompt:
    """A chat as plain text, for a model without a chat template."""
    lines = [f"{m['role'].capitalize()}: {m['content']}" for m in prompt.messages or ()]
    return Prompt(prompt.name, prompt.kind, text="\n".join([*lines, "Assistant:"]))


def read_prompts(path: Path) -> list[Prompt]:
    """One JSON object a line: `prompt` (text), `input_ids`, `messages` or `turns`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotTest(
            "--prompts", expected=f"a readable text file {path}", found=error, remedy="Check it."
        ) from error
    found = [_read(line, n) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise CannotTest(
            "--prompts", expected="at least one line", found="none", remedy=f"Fill {path}."
        )
    return found


def _read(line: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad_line(number, error) from error
    name = f"line-{number}"
    if isinstance(row, dict):
        text = row.get("prompt", row.get("text"))
        if isinstance(text, str) and text:
            return Prompt(name, "file", text=text)
        if isinstance(ids := row.get("input_ids"), list) and ids and all(map(_is_id, ids)):
            return Prompt(name, "file", ids=tuple(ids))
        if isinstance(turns := row.get("turns"), list) and turns and _all(turns, str):
            return Prompt(name, "file", messages=({"role": "user", "content": turns[0]},))
        if isinstance(said := row.get("messages"), list) and said and all(map(_is_message, said)):
            return Prompt(name, "file", messages=tuple(said))
    raise _bad_line(number, "none of them")


def _is_id(value: Any) -> bool:
    # An id of any tokenizer fits; a larger number breaks some servers instead of being refused.
    return type(value) is int and 0 <= value < 2**31


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _all([value.get("role"), value.get("content")], str)


def _all(values: list[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _bad_line(number: int, found: object) -> CannotTest:
    return CannotTest(
        f"--prompts, line {number}",
        expected="a JSON object with prompt (text), input_ids (whole numbers from 0), messages "
        "(each a role and a content of text) or turns (texts)",
        found=found,
        remedy="Correct the line or take it out.",
    )
