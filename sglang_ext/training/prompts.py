"""Prompts: reading them, the fixed held-out split, variations of them, near copies.

A prompt file is JSON lines, `{"turns": [str, ...]}`; the first turn is used and the file's stem
names the set.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["math", "code", "chat"]
KINDS: tuple[Kind, ...] = ("math", "code", "chat")

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."

_NAMES = [
    "Alice", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Isabel", "Jack", "Kate",
    "Liam", "Maria", "Noah", "Olivia", "Peter", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Victor",
    "Wendy", "Xavier", "Yara", "Zoe", "Adam", "Bella", "Carlos", "Diana", "Ethan", "Fiona",
    "George", "Hannah", "Ivan", "Julia", "Kevin", "Laura", "Marco", "Nina", "Oscar", "Paula",
    "Ravi", "Sarah", "Tom", "Vera", "Will", "Anna", "James", "Mary", "John", "Robert", "Michael",
    "Linda", "Jim", "Janet", "Tim", "Josh", "Mark", "Lisa", "Amy", "Eric", "Mike", "Mason",
]  # fmt: skip
_NAME = re.compile(r"\b(" + "|".join(_NAMES) + r")\b")
_NUMBER = re.compile(r"(?<![\w\\{.])\d{1,5}(?![\w.}]\d)")
_WORD = re.compile(r"[a-z]+|#|[^\sa-z#]")


@dataclass(frozen=True)
class Prompt:
    """One user turn. `source` is the set it belongs to, `kind` the sort of task."""

    text: str
    source: str
    kind: Kind


def kind_of(source: str) -> Kind:
    """The sort of task of a prompt set, from its name; unknown sets count as chat."""
    name = source.lower()
    if any(part in name for part in ("math", "gsm", "aime")):
        return "math"
    if any(part in name for part in ("mbpp", "humaneval", "code")):
        return "code"
    return "chat"


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file, or of every `*.jsonl` in a directory.

    Raises:
        FileNotFoundError: nothing to read at `path`.
        ValueError: a line is not `{"turns": [str, ...]}`.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(
            f"no prompts at {path}: give a JSONL file, or a directory of them, "
            'with lines like {"turns": ["a question"]}'
        )
    prompts: dict[str, Prompt] = {}
    for file in files:
        # Not splitlines(): a JSON string may hold other line separators (U+2028) unescaped.
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            text = _first_turn(line, f"{file}:{number}")
            prompts.setdefault(text, Prompt(text, file.stem, kind_of(file.stem)))
    return list(prompts.values())


def is_held_out(text: str) -> bool:
    """Whether a prompt belongs to the held-out tenth. Depends on nothing but its words."""
    digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def split(prompts: Iterable[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts; training ones that nearly copy a held-out one are dropped."""
    train: list[Prompt] = []
    held: list[Prompt] = []
    for prompt in prompts:
        (held if is_held_out(prompt.text) else train).append(prompt)
    copies = NearCopies(prompt.text for prompt in held)
    return [prompt for prompt in train if not copies.contains(prompt.text)], held


class NearCopies:
    """Finds texts that share most of their wording with one of a fixed set.

    Numbers count as equal, so a problem with other figures is a near copy too. Similarity is the
    share of the shorter text's word trigrams that both have.
    """

    def __init__(self, texts: Iterable[str], *, threshold: float = 0.6) -> None:
        self._threshold = threshold
        self._sizes: list[int] = []
        self._index: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            shingles = _shingles(text)
            self._sizes.append(len(shingles))
            for shingle in shingles:
                self._index[shingle].append(number)

    def contains(self, text: str) -> bool:
        """Whether `text` is a near copy of one of the set."""
        shingles = _shingles(text)
        shared = Counter(number for s in shingles for number in self._index.get(s, ()))
        return any(
            count >= self._threshold * min(len(shingles), self._sizes[number])
            for number, count in shared.items()
        )


def vary(text: str, rng: random.Random) -> str:
    """The same problem with other numbers of a like size and other first names."""
    names = sorted(set(_NAME.findall(text)))
    renamed = dict(zip(names, rng.sample(_NAMES, len(names)), strict=True))
    body, suffix = (
        (text[: -len(STEP_BY_STEP)], STEP_BY_STEP) if text.endswith(STEP_BY_STEP) else (text, "")
    )
    numbers: dict[str, str] = {}

    def new_number(match: re.Match[str]) -> str:
        old = match.group()
        return numbers.setdefault(old, str(_like(int(old), rng)))

    body = _NAME.sub(lambda match: renamed.get(match.group(), match.group()), body)
    return _NUMBER.sub(new_number, body) + suffix


def opening(text: str, rng: random.Random) -> str:
    """The first words of a prompt (a quarter to two thirds), for the target to continue."""
    body = text.removesuffix(STEP_BY_STEP)
    words = body.split(" ")[:40]
    keep = rng.randint(max(1, len(words) // 4), max(1, 2 * len(words) // 3))
    return " ".join(words[:keep])


def _like(number: int, rng: random.Random) -> int:
    if number < 2:
        return number
    if number % 10 == 0:
        return 10 * max(1, round(number / 10 * rng.uniform(0.4, 2.0)))
    return max(2, round(number * rng.uniform(0.4, 2.0)))


def _shingles(text: str) -> set[tuple[str, ...]]:
    body = re.sub(r"\d+", "#", text.removesuffix(STEP_BY_STEP).lower())
    words = _WORD.findall(body)
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def _first_turn(line: str, where: str) -> str:
    try:
        turns = json.loads(line)["turns"]
        if not (turns and isinstance(turns[0], str)):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        expected = '{"turns": [str, ...]}'
        raise ValueError(f"{where}: expected {expected}, found {line[:80]!r}") from error
    return str(turns[0])
