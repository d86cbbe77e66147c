"""Batches for training and evaluation: texts, anchors, and what the target says about them."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.training.losses import Labels, target_labels
from sglang_ext.training.shards import Text, read_shard, shard_files
from sglang_ext.training.target import PackedLinear, Target

CANDIDATES = 16  # likeliest tokens kept per position; the rest of the mass is negligible


@dataclass(frozen=True)
class Lesson:
    """What the target says along one text, teacher-forced; what a draft is trained on.

    features: [T, ids * hidden] bf16, outputs of the captured layers.
    best: [T, n] int16 draft ids of the likeliest next tokens; probability: [T, n] fp16, over the
        draft's vocabulary.
    """

    features: Tensor
    best: Tensor
    probability: Tensor


def study(
    target: Target, texts: list[Text], layer_ids: tuple[int, ...], head: PackedLinear
) -> list[Lesson]:
    """One pass of the target over whole texts, one slot each.

    `head` maps final hidden states to draft-vocabulary logits.
    """
    if len(texts) > target.shape.slots:
        raise ValueError(f"texts: expected at most {target.shape.slots} slots, found {len(texts)}")
    lengths = [len(text.tokens) for text in texts]
    slot = torch.arange(len(texts)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    flat = torch.tensor([token for text in texts for token in text.tokens])
    final, captured = target.forward(flat, slot, position, capture=layer_ids)
    best, probability = target_labels(head(final), CANDIDATES)
    columns = (torch.cat(captured, dim=-1), best.to(torch.int16), probability.to(torch.float16))
    return [Lesson(*parts) for parts in zip(*(c.split(lengths) for c in columns), strict=True)]


class LessonCache:
    """Lessons on disk, so that a text seen again costs no pass of the target.

    `recipe` names what the lessons depend on besides the text (target, layers, vocabulary). No
    more than `limit` bytes are kept; texts beyond are studied again each time.
    """

    def __init__(self, directory: Path, *, recipe: str, limit: int) -> None:
        self._directory = directory / hashlib.sha256(recipe.encode()).hexdigest()[:12]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._limit = limit
        self._size = sum(path.stat().st_size for path in self._directory.glob("*.safetensors"))

    def get(self, text: Text) -> Lesson | None:
        path = self._path(text)
        return Lesson(**load_file(path)) if path.exists() else None

    def put(self, text: Text, lesson: Lesson) -> None:
        if self._size >= self._limit:
            return
        parts = {name: part.contiguous() for name, part in vars(lesson).items()}
        scratch = self._path(text).with_suffix(".tmp")
        save_file(parts, scratch)
        os.replace(scratch, self._path(text))
        self._size += sum(part.nbytes for part in parts.values())

    def _path(self, text: Text) -> Path:
        name = hashlib.sha256(np.array(text.tokens, np.uint16).tobytes()).hexdigest()[:24]
        return self._directory / f"{name}.safetensors"


@dataclass(frozen=True)
class Batch:
    """Padded texts with their lessons.

    tokens: [texts, T] int64. lengths, prompts: [texts] int64 tokens in all, tokens of the prompt.
    features: [texts, T, ids * hidden] bf16. best: [texts, T, n] int64. probability: fp32.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor
    features: Tensor
    best: Tensor
    probability: Tensor


def make_batch(texts: list[Text], lessons: list[Lesson], *, multiple: int = 1) -> Batch:
    """Pad texts and lessons to a common length, a multiple of `multiple`."""
    longest = max(len(text.tokens) for text in texts)
    longest = -(-longest // multiple) * multiple

    def padded(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        out = torch.zeros(len(parts), longest, *parts[0].shape[1:], dtype=dtype)
        for row, part in enumerate(parts):
            out[row, : len(part)] = part
        return out

    return Batch(
        tokens=padded([torch.tensor(text.tokens) for text in texts], torch.int64),
        lengths=torch.tensor([len(text.tokens) for text in texts]),
        prompts=torch.tensor([text.prompt_length for text in texts]),
        features=padded([lesson.features for lesson in lessons], torch.bfloat16),
        best=padded([lesson.best for lesson in lessons], torch.int64),
        probability=padded([lesson.probability for lesson in lessons], torch.float32),
    )


def sample_anchors(batch: Batch, blocks: int, generator: torch.Generator) -> Tensor:
    """[texts, blocks] int64 anchor positions in the answers, -1 where a text has fewer.

    An anchor has at least one token after it. Positions of a text are distinct.
    """
    positions = torch.arange(batch.tokens.shape[1])
    usable = (positions >= batch.prompts[:, None] - 1) & (positions < batch.lengths[:, None] - 1)
    order = torch.rand(usable.shape, generator=generator).masked_fill(~usable, -1.0)
    picked = F.pad(order, (0, max(0, blocks - usable.shape[1])), value=-1.0).topk(blocks, dim=1)
    return picked.indices.masked_fill(picked.values < 0, -1)


@dataclass(frozen=True)
class BlockLabels:
    """What stands at each drafted position of each anchor.

    valid: [texts, blocks, gamma] bool, whether the text goes that far.
    previous, labels: only the valid rows, in that order; previous [rows] int64.
    """

    previous: Tensor
    valid: Tensor
    labels: Labels


def label_blocks(batch: Batch, anchors: Tensor, gamma: int, *, t2d: Tensor) -> BlockLabels:
    """What the target says after each anchor; `t2d` [vocab] maps target ids to draft ids."""
    at = anchors.clamp_min(0)[..., None] + torch.arange(gamma)  # where the previous token stands
    valid = (anchors >= 0)[..., None] & (at + 1 < batch.lengths[:, None, None])
    row = torch.arange(len(batch.tokens))[:, None, None].expand_as(at)[valid]
    at = at[valid]
    return BlockLabels(
        previous=batch.tokens[row, at],
        valid=valid,
        labels=Labels(
            token=t2d[batch.tokens[row, at + 1]],
            best=batch.best[row, at],
            probability=batch.probability[row, at],
        ),
    )


class TextStream:
    """Batches of texts from a directory of shards that may still be growing.

    Every text is used once before any is used again; each batch holds texts of like length.
    """

    def __init__(self, directory: Path, *, texts: int, longest: int, seed: int) -> None:
        self._directory, self._texts, self._longest = directory, texts, longest
        self._rng = random.Random(seed)
        self._known: dict[Path, list[Text]] = {}

    def __iter__(self) -> Iterator[list[Text]]:
        while True:
            pool = self._epoch()
            if len(pool) < self._texts:
                raise ValueError(
                    f"{self._directory}: {len(pool)} texts, too few for batches of {self._texts}; "
                    "run `train-draft generate` first"
                )
            chunk = 16 * self._texts
            for start in range(0, len(pool), chunk):
                part = sorted(pool[start : start + chunk], key=lambda text: len(text.tokens))
                batches = [
                    part[i : i + self._texts]
                    for i in range(0, len(part) - self._texts + 1, self._texts)
                ]
                yield from self._rng.sample(batches, len(batches))

    def tokens(self) -> int:
        """Answer tokens read so far."""
        return sum(text.answer_length for texts in self._known.values() for text in texts)

    def all_texts(self) -> list[Text]:
        """Every text on disk now."""
        for path in shard_files(self._directory):
            if path not in self._known:
                self._known[path] = [t for t in read_shard(path) if t.answer_length >= 8]
        return [
            text
            for texts in self._known.values()
            for text in texts
            if len(text.tokens) <= self._longest
        ]

    def _epoch(self) -> list[Text]:
        pool = self.all_texts()
        self._rng.shuffle(pool)
        return pool
