"""What is measured: settings of a server, and the loads each is put under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sglang_ext.bench_cli.conversations import conversations_in
from sglang_ext.launcher.errors import nearest
from sglang_ext.launcher.rules_speculation import ALGORITHMS
from sglang_ext.lossless.errors import CannotTest

# Algorithms that draft without a checkpoint of their own.
_NO_DRAFT = ("NGRAM", "NEXTN")
BUILT_IN = ("code", "math", "chat")


@dataclass(frozen=True)
class Setting:
    """A server: without speculation, or one algorithm with one number of drafts.

    gamma: drafts per round; None leaves it to the server
    """

    algorithm: str = "none"
    draft: str | None = None
    gamma: int | None = None

    @property
    def key(self) -> str:
        """In the results file; another draft is another setting."""
        name = self.algorithm if self.gamma is None else f"{self.algorithm}, gamma {self.gamma}"
        return name if self.draft is None else f"{name}, {self.draft}"

    @property
    def flags(self) -> list[str]:
        """Launch arguments that turn it on."""
        if self.algorithm == "none":
            return []
        flags = ["--speculative-algorithm", self.algorithm]
        if self.draft is not None:
            flags += ["--speculative-draft-model-path", self.draft]
        if self.gamma is not None:
            flags += ["--speculative-num-draft-tokens", str(self.gamma + 1)]
        return flags


@dataclass(frozen=True)
class Dataset:
    """name: in the results; path: a file as `bench_serving` reads it.

    Without a path: `random` ids, or the prompts of one of `BUILT_IN`, from `sglang-ext lossless`.
    """

    name: str
    path: str | None = None

    @property
    def key(self) -> str:
        return self.name if self.path is None else f"{self.name}={self.path}"

    @property
    def is_random(self) -> bool:
        return self.path is None and self.name == "random"


@dataclass(frozen=True)
class Point:
    """One load on one server."""

    setting: Setting
    dataset: Dataset
    concurrency: int

    @property
    def key(self) -> str:
        return f"{self.setting.key} | {self.dataset.key} | {self.concurrency}"


def settings(algorithms: Sequence[str], gammas: Sequence[int | None]) -> list[Setting]:
    """`none` first, then NAME or NAME=DRAFT with each gamma. Raises CannotTest."""
    found = [Setting()]
    for given in algorithms:
        name, _, draft = given.partition("=")
        if not name or (not draft and name.upper() not in _NO_DRAFT):
            raise CannotTest(
                "--with",
                expected="ALGORITHM=DRAFT, e.g. DSPARK=path/to/draft",
                found=repr(given),
                remedy="Name the draft's checkpoint.",
            )
        if name.upper() not in ALGORITHMS:
            raise CannotTest(
                "--with",
                expected=f"one of {', '.join(ALGORITHMS)}",
                found=repr(name),
                remedy=nearest(name.upper(), ALGORITHMS) or "Choose one of them.",
            )
        if draft and Path(draft).exists():
            # Results are read from other folders too.
            draft = str(Path(draft).resolve())
        found += [Setting(name.upper(), draft or None, gamma) for gamma in gammas]
    return found


def datasets(given: Sequence[str]) -> list[Dataset]:
    """`random`, a built-in set or NAME=FILE. Raises CannotTest."""
    found: list[Dataset] = []
    for item in given:
        name, _, path = item.partition("=")
        if path and not Path(path).is_file():
            raise CannotTest(
                "--dataset", expected="a file", found=path, remedy="Check the path in NAME=FILE."
            )
        if not path and name not in ("random", *BUILT_IN):
            raise CannotTest(
                "--dataset",
                expected=f"random, {', '.join(BUILT_IN)}, or NAME=FILE with conversations as "
                "bench_serving reads them",
                found=repr(item),
                remedy="No data set is downloaded; name a local file.",
            )
        if name in (other.name for other in found):
            raise CannotTest(
                "--dataset",
                expected="every name once",
                found=f"{name!r} twice",
                remedy="Call one of them something else.",
            )
        if path:
            conversations_in(Path(path).resolve())
        # The tool runs in a folder of its own.
        found.append(Dataset(name, str(Path(path).resolve()) if path else None))
    return found


def points(
    chosen: Sequence[Setting], loads: Sequence[Dataset], concurrency: Sequence[int]
) -> list[Point]:
    """The whole grid, server by server."""
    return [Point(*parts) for parts in product(chosen, loads, concurrency)]
