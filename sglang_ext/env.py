"""Environment variables of sglang-ext, each declared once with its type and default.

SGLang's argument record cannot be extended from outside, so every knob that has no flag of
SGLang's own is a variable here. Reading is lazy: a variable set by a parent process is seen by
the ranks it spawns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class EnvError(ValueError):
    """A variable holds a value that cannot be used."""


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One environment variable: `get()` parses it or raises `EnvError` with the remedy."""

    name: str
    default: T
    parse: Callable[[str], T]
    expected: str
    help: str

    def get(self) -> T:
        raw = os.environ.get(self.name)
        if raw is None or raw == "":
            return self.default
        try:
            return self.parse(raw)
        except ValueError as error:
            raise EnvError(
                f"{self.name}: expected {self.expected}, found {raw!r}. {self.help}"
            ) from error

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name))


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        value = raw.strip().lower()
        if value not in allowed:
            raise ValueError(value)
        return value

    return parse


def _flag(raw: str) -> bool:
    value = raw.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        value = int(raw)
        if value < minimum:
            raise ValueError(value)
        return value

    return parse


SPEC = EnvVar(
    "SGLANG_EXT_SPEC",
    "auto",
    _one_of("auto", "always", "never"),
    "auto, always or never",
    "Decides whose DSPARK / DFLASH worker runs: auto takes over where SGLang's own cannot run.",
)
MODELS = EnvVar(
    "SGLANG_EXT_MODELS",
    "auto",
    _one_of("auto", "always", "never"),
    "auto, always or never",
    "Decides who loads DeepSeek-V4 and V3.2: auto takes over where SGLang's own cannot run.",
)
INDEXER = EnvVar(
    "SGLANG_EXT_INDEXER",
    "exact",
    _one_of("exact", "fp8"),
    "exact or fp8",
    "fp8 rounds DeepSeek-V3.2's index vectors as the published kernels do; exact keeps them.",
)
INDEX_SHARE = EnvVar(
    "SGLANG_EXT_INDEX_SHARE",
    1,
    _at_least(1),
    "a whole number of layers, at least 1",
    "Above 1, every n-th layer with an indexer selects, the others reuse that: approximate.",
)
PLATFORM = EnvVar(
    "SGLANG_EXT_PLATFORM",
    "auto",
    _one_of("auto", "cpu", "off"),
    "auto, cpu or off",
    "auto serves on the CPU where no CUDA GPU is found; cpu forces it; off leaves SGLang alone.",
)
SCHEDULER = EnvVar(
    "SGLANG_EXT_SCHEDULER",
    "sync",
    _one_of("sync", "async", "off"),
    "sync, async or off",
    "DSPARK's verify scheduler: Algorithm 1, its asynchronous variant, or verify every draft.",
)
PAYS = EnvVar(
    "SGLANG_EXT_DRAFT_PAYS",
    True,
    _flag,
    "0 or 1",
    "1 lets a round be a plain decode where history says that its draft would not pay.",
)
FAST_FORWARD = EnvVar(
    "SGLANG_EXT_FAST_FORWARD",
    True,
    _flag,
    "0 or 1",
    "1 packs linear weights and fuses norms on the CPU; 0 keeps SGLang's own layers.",
)
PROBE_EVERY = EnvVar(
    "SGLANG_EXT_PROBE_EVERY",
    32,
    _at_least(1),
    "a whole number of rounds, at least 1",
    "How many plain rounds pass before a paused draft is tried again.",
)
OVERLAP = EnvVar(
    "SGLANG_EXT_OVERLAP",
    False,
    _flag,
    "0 or 1",
    "1 keeps SGLang's overlap scheduling on a CPU, where it gains nothing and costs a copy.",
)
CACHE_DIR = EnvVar(
    "SGLANG_EXT_CACHE",
    Path.home() / ".cache" / "sglang-ext",
    lambda raw: Path(raw).expanduser(),
    "a directory",
    "Where the demo model and measured tables are kept.",
)

ALL: tuple[EnvVar, ...] = (
    SPEC,
    MODELS,
    INDEXER,
    INDEX_SHARE,
    PLATFORM,
    SCHEDULER,
    PAYS,
    PROBE_EVERY,
    FAST_FORWARD,
    OVERLAP,
    CACHE_DIR,
)
