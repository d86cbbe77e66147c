"""The training loop: one pass of the target feeds every draft being trained."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_ext.training.batches import (
    Batch,
    Lesson,
    LessonCache,
    TextStream,
    label_blocks,
    make_batch,
    sample_anchors,
    study,
)
from sglang_ext.training.draft import Draft, DraftShape
from sglang_ext.training.evaluate import Evaluation, evaluate
from sglang_ext.training.losses import LossWeights, block_loss, competing_tokens
from sglang_ext.training.shards import Text
from sglang_ext.training.start import fit_scales, fix_offsets, new_draft
from sglang_ext.training.target import PackedLinear, Target


@dataclass(frozen=True)
class Plan:
    """How to train.

    minutes: length of the schedule in time spent training; the learning rate follows a cosine
        over it after `warmup` steps.
    table_rate, norm_rate: factors on the learning rate of the Markov tables and of the norms.
    blocks: anchors per text and step. extra_tokens: see `competing_tokens`.
    evaluate_every, checkpoint_every: minutes spent training.
    """

    minutes: float
    texts: int = 8
    blocks: int = 32
    extra_tokens: int = 1024
    learning_rate: float = 1.2e-3
    table_rate: float = 0.1
    norm_rate: float = 5.0
    warmup: int = 50
    clip: float = 1.0
    weight_decay: float = 0.01
    evaluate_every: float = 10.0
    checkpoint_every: float = 5.0
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)

    def rate(self, step: int, seconds: float) -> float:
        """Learning rate at `step`, `seconds` into training."""
        progress = min(1.0, seconds / (60 * self.minutes))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * max(0.01, cosine)


class Teacher:
    """The target's lessons, from the cache where a text has been seen before."""

    def __init__(
        self, target: Target, layer_ids: tuple[int, ...], d2t: torch.Tensor, cache: LessonCache
    ) -> None:
        self.target, self.layer_ids, self.cache = target, layer_ids, cache
        self._head = PackedLinear(target.head_weight[d2t + torch.arange(len(d2t))])

    def lessons(self, texts: list[Text]) -> Iterator[Lesson]:
        """Lessons in the order of `texts`."""
        group = self.target.shape.slots
        for start in range(0, len(texts), group):
            part = texts[start : start + group]
            known = [self.cache.get(text) for text in part]
            new = [text for text, lesson in zip(part, known, strict=True) if lesson is None]
            fresh = iter(study(self.target, new, self.layer_ids, self._head) if new else [])
            for text, lesson in zip(part, known, strict=True):
                if lesson is None:
                    lesson = next(fresh)
                    self.cache.put(text, lesson)
                yield lesson


class Student:
    """A draft with its optimiser."""

    def __init__(self, name: str, draft: Draft, plan: Plan) -> None:
        self.name, self.draft, self.plan = name, draft, plan
        named = list(draft.named_parameters())
        tables = [p for name, p in named if name.startswith("markov_head.")]
        rest = [p for name, p in named if not name.startswith("markov_head.")]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() >= 2], "weight_decay": plan.weight_decay},
                # Norms set the scale of whole layers, and start far from where they end.
                {
                    "params": [p for p in rest if p.dim() < 2],
                    "weight_decay": 0.0,
                    "scale": plan.norm_rate,
                },
                # They start as a fitted bigram model: at the full rate, noise would undo it.
                {"params": tables, "weight_decay": 0.0, "scale": plan.table_rate},
            ],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(
        self, batch: Batch, anchors: torch.Tensor, rate: float, noise: torch.Generator
    ) -> dict[str, float]:
        """One update from the blocks at `anchors`; returns the loss terms."""
        draft = self.draft
        gamma = draft.shape.layout.gamma
        labels = label_blocks(batch, anchors, gamma, t2d=draft.t2d)
        at = anchors.clamp_min(0)
        hidden = draft.block_hidden(batch.features, at, batch.tokens.gather(1, at))
        subset, targets = competing_tokens(
            labels.labels, draft.shape.draft_vocab, self.plan.extra_tokens, noise
        )
        logits, confidence = draft.logits(hidden[labels.valid], labels.previous, subset)
        weight = self.plan.loss.positions(gamma).expand(labels.valid.shape)[labels.valid]
        loss, report = block_loss(logits, confidence, targets, weight, self.plan.loss)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), self.plan.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        report["norm"] = float(norm)
        return report


def make_students(
    shapes: dict[str, DraftShape],
    target: Target,
    d2t: torch.Tensor,
    lessons: list[Lesson],
    plan: Plan,
) -> list[Student]:
    """Fresh drafts, started from the target, their scales fitted on a few lessons."""
    # Without the first token: its activations dwarf all others and say nothing.
    features = torch.cat([lesson.features[1:] for lesson in lessons])
    students = []
    for name, shape in shapes.items():
        torch.manual_seed(plan.seed)
        draft = new_draft(shape, target, d2t, positions=target.shape.capacity)
        fit_scales(draft, target, features)
        fix_offsets(draft, features)
        students.append(Student(name, draft, plan))
    return students


class Trainer:
    """Trains students until the plan's time is spent; resumable from its checkpoint file."""

    def __init__(
        self,
        students: list[Student],
        teacher: Teacher,
        stream: TextStream,
        held_out: list[Text],
        plan: Plan,
        checkpoint: Path,
        report: Callable[[str], None] = print,
    ) -> None:
        self.students, self.teacher, self.stream = students, teacher, stream
        self.held_out, self.plan, self.checkpoint, self.report = held_out, plan, checkpoint, report
        self.step, self.seconds, self.trained_tokens = 0, 0.0, 0
        self._noise = torch.Generator().manual_seed(plan.seed)

    def save(self) -> None:
        """Write everything needed to go on, atomically."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "trained_tokens": self.trained_tokens,
            "shapes": {s.name: asdict(s.draft.shape) for s in self.students},
            "drafts": {s.name: s.draft.state_dict() for s in self.students},
            "optimizers": {s.name: s.optimizer.state_dict() for s in self.students},
        }
        scratch = self.checkpoint.with_suffix(".tmp")
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, scratch)
        os.replace(scratch, self.checkpoint)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.step, self.seconds = state["step"], state["seconds"]
        self.trained_tokens = state["trained_tokens"]
        self._noise.manual_seed(self.plan.seed + self.step)
        for student in self.students:
            student.draft.load_state_dict(state["drafts"][student.name])
            student.optimizer.load_state_dict(state["optimizers"][student.name])

    def run(self) -> None:
        """Train to the end of the plan, saving and evaluating on the way."""
        saved = evaluated = told = self.seconds
        sums: dict[str, float] = defaultdict(float)
        since = 0
        for texts in self.stream:
            if self.seconds >= 60 * self.plan.minutes:
                break
            begin = time.perf_counter()
            batch = make_batch(texts, list(self.teacher.lessons(texts)), multiple=32)
            anchors = sample_anchors(batch, self.plan.blocks, self._noise)
            rate = self.plan.rate(self.step, self.seconds)
            for student in self.students:
                for term, value in student.step(batch, anchors, rate, self._noise).items():
                    sums[f"{student.name}.{term}"] += value
            self.step += 1
            since += 1
            self.trained_tokens += sum(text.answer_length for text in texts)
            self.seconds += time.perf_counter() - begin
            if self.seconds - told > 30:
                self._tell(sums, since, rate, self.seconds - told)
                told, since = self.seconds, 0
                sums.clear()
            if self.seconds - saved > 60 * self.plan.checkpoint_every:
                saved = self.seconds
                self.save()
            if self.seconds - evaluated > 60 * self.plan.evaluate_every:
                evaluated = self.seconds
                self.evaluate()
        self.save()
        self.evaluate()

    def evaluate(self) -> dict[str, Evaluation]:
        """Held-out acceptance of every student, reported."""
        drafts = {student.name: student.draft for student in self.students}
        result = evaluate(drafts, self.held_out, self.teacher.lessons)
        for name, evaluation in result.items():
            self.report(describe(name, evaluation))
        return result

    def _tell(self, sums: dict[str, float], steps: int, rate: float, seconds: float) -> None:
        terms = " ".join(f"{term} {value / steps:.3f}" for term, value in sums.items())
        self.report(
            f"{self.seconds / 60:6.1f}/{self.plan.minutes:g} min  step {self.step}  "
            f"{steps / seconds:.2f} steps/s  lr {rate:.1e}  "
            f"answer tokens seen {self.trained_tokens:,}  {terms}"
        )


def describe(name: str, evaluation: Evaluation) -> str:
    """One line: tau overall and per source, and conditional acceptance per position."""
    total = evaluation.total()
    sources = " ".join(
        f"{source} {tally.tau:.2f}" for source, tally in sorted(evaluation.by_source.items())
    )
    positions = " ".join(f"{rate:.3f}"[1:] for rate in total.conditional)
    return f"{name}: held-out tau {total.tau:.3f} ({sources}); by position {positions}"
