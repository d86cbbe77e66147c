"""Held-out acceptance length, by replaying greedy rounds over the target's stored answers.

With greedy decoding the committed tokens do not depend on the draft, so a round at any anchor can
be played against the stored text: tau is tokens committed per round, the bonus token included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_ext.training.batches import Lesson
from sglang_ext.training.draft import Draft, linear
from sglang_ext.training.shards import Text


@dataclass
class Tally:
    """Counts over rounds. reached, accepted: per position, how often it was tried and right."""

    tokens: int = 0
    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.rounds)

    @property
    def conditional(self) -> list[float]:
        """Acceptance of each position given that the earlier ones were accepted."""
        return [a / max(1, r) for a, r in zip(self.accepted, self.reached, strict=True)]

    def add(self, other: Tally) -> None:
        self.tokens += other.tokens
        self.rounds += other.rounds
        width = max(len(self.reached), len(other.reached))
        for name in ("reached", "accepted"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (width - len(mine)))
            for i, value in enumerate(theirs):
                mine[i] += value


@dataclass
class Evaluation:
    """Per source, and what STS is fitted on: confidence logits and prefix masks of the rounds."""

    by_source: dict[str, Tally]
    confidence: Tensor
    prefix_mask: Tensor

    def total(self, keep: Callable[[str], bool] = lambda source: True) -> Tally:
        """The tallies of the sources that `keep` takes, added up."""
        total = Tally()
        for source, tally in self.by_source.items():
            if keep(source):
                total.add(tally)
        return total


@torch.no_grad()
def draft_tokens(draft: Draft, hidden: Tensor, anchor_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy drafts after each anchor.

    Args:
        hidden: [blocks, gamma, hidden]. anchor_tokens: [blocks] int64.

    Returns:
        [blocks, gamma] int64 target ids and [blocks, gamma] raw confidence (zeros for DFLASH).
    """
    blocks, gamma, _ = hidden.shape
    base = linear(hidden, draft.head)
    tables = draft.markov_tables()
    confidence = torch.zeros(blocks, gamma)
    if tables is None:
        best = base.argmax(-1)
        return best + draft.d2t[best], confidence
    first, second = (table.to(hidden.dtype) for table in tables)
    drafts = torch.empty(blocks, gamma, dtype=torch.int64)
    previous = anchor_tokens
    for k in range(gamma):
        prior = first[previous]
        confidence[:, k] = draft.confidence(torch.cat([hidden[:, k], prior], dim=-1))
        best = (base[:, k] + linear(prior, second)).argmax(-1)
        previous = best + draft.d2t[best]
        drafts[:, k] = previous
    return drafts, confidence


def play_rounds(correct: Tensor, length: int) -> tuple[list[int], Tally]:
    """Rounds over one answer.

    Args:
        correct: [length - 1, gamma] bool; whether draft k after answer token i is answer token
            i + k + 1 (False beyond the end). The first answer token comes from prefill.

    Returns:
        The anchors where rounds start and the counts.
    """
    gamma = correct.shape[1]
    runs = correct.long().cumprod(1).sum(1).tolist()
    tally = Tally(reached=[0] * gamma, accepted=[0] * gamma)
    anchors: list[int] = []
    at = 0
    while at < length - 1:
        anchors.append(at)
        run = min(runs[at], length - 1 - at)
        tally.rounds += 1
        tally.tokens += min(run + 1, length - 1 - at)
        for k in range(min(gamma, length - 1 - at)):
            if k > run:
                break
            tally.reached[k] += 1
            tally.accepted[k] += int(k < run)
        at += run + 1
    return anchors, tally


@torch.no_grad()
def evaluate(
    drafts: dict[str, Draft],
    texts: list[Text],
    lessons: Callable[[list[Text]], Iterable[Lesson]],
) -> dict[str, Evaluation]:
    """Acceptance of each draft over `texts` (greedy answers of the target).

    `lessons` yields what the target says along each of the texts it is given.
    """
    tallies: dict[str, dict[str, Tally]] = {name: defaultdict(Tally) for name in drafts}
    confidences: dict[str, list[Tensor]] = {name: [] for name in drafts}
    masks: dict[str, list[Tensor]] = {name: [] for name in drafts}
    usable = [text for text in texts if text.answer_length > 1]
    for text, lesson in zip(usable, lessons(usable), strict=True):
        answer = torch.arange(text.prompt_length, len(text.tokens) - 1)
        tokens = torch.tensor(text.tokens)
        for name, draft in drafts.items():
            hidden = draft.block_hidden(lesson.features[None], answer[None], tokens[answer][None])[
                0
            ]
            drafted, confidence = draft_tokens(draft, hidden, tokens[answer])
            correct = _correct(drafted, tokens, answer)
            anchors, tally = play_rounds(correct, text.answer_length)
            tallies[name][text.source].add(tally)
            confidences[name].append(confidence[anchors])
            masks[name].append(correct[anchors].long().cumprod(1))
    return {
        name: Evaluation(dict(tallies[name]), torch.cat(confidences[name]), torch.cat(masks[name]))
        for name in drafts
    }


def _correct(drafted: Tensor, tokens: Tensor, answer: Tensor) -> Tensor:
    """drafted [blocks, gamma] against the text after each anchor position in `answer`."""
    at = answer[:, None] + torch.arange(1, drafted.shape[1] + 1)
    inside = at < len(tokens)
    return (drafted == tokens[at.clamp_max(len(tokens) - 1)]) & inside
