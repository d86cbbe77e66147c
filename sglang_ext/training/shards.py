"""Token shards: the training texts on disk, appended by atomic renames."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_ext.training.prompts import KINDS, Kind


@dataclass(frozen=True)
class Text:
    """A prompt and its answer: tokens[:prompt_length] was given, the rest is the target's."""

    tokens: list[int]
    prompt_length: int
    kind: Kind
    source: str = ""

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length


class ShardWriter:
    """Collects texts and writes a shard every `every` of them."""

    def __init__(self, directory: Path, *, writer: str, every: int = 128) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._writer, self._every = directory, writer, every
        self._buffer: list[Text] = []

    def add(self, text: Text) -> None:
        self._buffer.append(text)
        if len(self._buffer) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one file; a reader sees all of it or none."""
        if not self._buffer:
            return
        name = f"{time.time_ns():020d}-{self._writer}.npz"
        scratch = self._directory / f".{name}.tmp"
        with scratch.open("wb") as file:
            np.savez(
                file,
                tokens=np.concatenate([np.array(t.tokens, np.uint16) for t in self._buffer]),
                lengths=np.array([len(t.tokens) for t in self._buffer], np.int32),
                prompt_lengths=np.array([t.prompt_length for t in self._buffer], np.int32),
                kinds=np.array([KINDS.index(t.kind) for t in self._buffer], np.int8),
                sources=np.array([t.source for t in self._buffer]),
            )
        os.replace(scratch, self._directory / name)
        self._buffer = []


def shard_files(directory: Path) -> list[Path]:
    """Finished shards of `directory`, oldest first."""
    return sorted(path for path in directory.glob("*.npz") if not path.name.startswith("."))


def read_shard(path: Path) -> Iterator[Text]:
    """The texts of one shard."""
    with np.load(path) as shard:
        tokens = shard["tokens"].astype(np.int64)
        ends = np.cumsum(shard["lengths"])
        starts = ends - shard["lengths"]
        rows = zip(
            starts, ends, shard["prompt_lengths"], shard["kinds"], shard["sources"], strict=True
        )
        for start, end, prompt, kind, source in rows:
            yield Text(tokens[start:end].tolist(), int(prompt), KINDS[kind], str(source))


def read_texts(directory: Path) -> list[Text]:
    """Every text of every finished shard."""
    return [text for path in shard_files(directory) for text in read_shard(path)]
