"""Greedy answers of the target, by continuous batching: a finished row is refilled at once.

Prompts are given, or the target writes them itself: sampling the user's turn after the chat
template's opening yields prompts like those it was tuned on (Xu et al., "Magpie", 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from sglang_ext.training.prompts import Kind
from sglang_ext.training.shards import Text
from sglang_ext.training.target import Target

_MARK = "\x00user turn\x00"


@dataclass(frozen=True)
class Job:
    """One thing to generate.

    With `write_prompt`, `text` opens a user turn that the target completes by sampling; `suffix`
    is then added and the whole answered. Otherwise `text` is the prompt to answer.
    """

    text: str
    kind: Kind
    source: str
    write_prompt: bool = False
    suffix: str = ""


@dataclass
class _Row:
    """A live slot: `tokens` so far, of which the first `done` have been run."""

    job: Job
    tokens: list[int]
    prompt_length: int
    done: int = 0

    def pending(self) -> list[int]:
        return self.tokens[self.done :]


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens, and the sampling of prompts."""

    prompt: int = 384
    answer: int = 256
    written_prompt: int = 128
    top_p: float = 0.95
    candidates: int = 64
    stop_loops: bool = True


class ChatFormat:
    """The chat template as text before and after the user's words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        self.before, self.after = str(rendered).split(_MARK)
        self.tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id

    def prompt(self, user: str) -> list[int]:
        """Tokens of a prompt, up to where the answer begins."""
        return self._encode(self.before + user + self.after)

    def opening(self, user: str) -> list[int]:
        """Tokens up to the middle of the user's turn."""
        return self._encode(self.before + user)

    def user_turn(self, prompt: list[int]) -> str:
        """The user's words in the tokens of a prompt."""
        return self.decode(prompt).removeprefix(self.before).removesuffix(self.after)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def loops(
    tokens: list[int], *, repeats: int = 4, least: int = 48, longest_period: int = 64
) -> bool:
    """Whether `tokens` ends in `repeats` or more copies of one phrase, `least` tokens in all."""
    for period in range(1, longest_period + 1):
        length = max(period * repeats, least)
        if length > len(tokens):
            return False
        tail = tokens[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False


@dataclass
class Generator:
    """Runs jobs over the target's slots and hands finished texts to `emit`.

    `accept_prompt` may refuse a prompt that the target wrote (a near copy, say).
    `rows_per_step` bounds the prompt rows that join one forward pass.
    """

    target: Target
    chat: ChatFormat
    jobs: Iterator[Job]
    emit: Callable[[Text], None]
    accept_prompt: Callable[[str], bool] = lambda text: True
    limits: Limits = field(default_factory=Limits)
    rows_per_step: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        self._live: dict[int, _Row] = {}
        self._free = deque(range(self.target.shape.slots))
        self._ready: deque[_Row] = deque()
        self._noise = torch.Generator().manual_seed(self.seed)
        self._exhausted = False

    @torch.no_grad()
    def run(self, keep_going: Callable[[], bool] = lambda: True) -> None:
        """Generate until the jobs end, or until `keep_going` says no (checked every step)."""
        while keep_going():
            self._admit()
            if not self._live:
                return
            self._step()

    def _admit(self) -> None:
        rows = sum(len(row.pending()) for row in self._live.values())
        while self._free and rows < self.rows_per_step:
            row = self._next_row()
            if row is None:
                return
            rows += len(row.tokens)
            self._live[self._free.popleft()] = row

    def _next_row(self) -> _Row | None:
        if self._ready:
            return self._ready.popleft()
        while not self._exhausted:
            job = next(self.jobs, None)
            if job is None:
                self._exhausted = True
                break
            row = self._new_row(job)
            if row is not None:
                return row
        return None

    def _new_row(self, job: Job) -> _Row | None:
        encode = self.chat.opening if job.write_prompt else self.chat.prompt
        tokens = encode(job.text)
        return _Row(job, tokens, len(tokens)) if len(tokens) <= self.limits.prompt else None

    def _step(self) -> None:
        slots = list(self._live)
        pending = [self._live[slot].pending() for slot in slots]
        counts = torch.tensor([len(tokens) for tokens in pending])
        done = torch.tensor([self._live[slot].done for slot in slots])
        ends = counts.cumsum(0)
        position = torch.arange(int(ends[-1])) - (ends - counts - done).repeat_interleave(counts)
        hidden, _ = self.target.forward(
            torch.tensor([token for tokens in pending for token in tokens]),
            torch.tensor(slots).repeat_interleave(counts),
            position,
        )
        logits = self.target.head(hidden[ends - 1])
        chosen = self.target.ops.argmax(logits).tolist()
        writing = [i for i, slot in enumerate(slots) if self._live[slot].job.write_prompt]
        if writing:
            for i, token in zip(writing, self._sample(logits[writing]), strict=True):
                chosen[i] = token
        for slot, token in zip(slots, chosen, strict=True):
            self._advance(slot, token)

    def _sample(self, logits: torch.Tensor) -> list[int]:
        """Nucleus sampling at temperature 1 over the best candidates of logits [rows, vocab]."""
        best = logits.float().softmax(-1).topk(self.limits.candidates)
        before = best.values.cumsum(-1) - best.values
        weights = best.values.masked_fill(before >= self.limits.top_p, 0.0)
        pick = torch.multinomial(weights, 1, generator=self._noise)
        return best.indices.gather(1, pick).squeeze(1).tolist()

    def _advance(self, slot: int, token: int) -> None:
        row = self._live[slot]
        row.done = len(row.tokens)
        row.tokens.append(token)
        written = len(row.tokens) - row.prompt_length
        if row.job.write_prompt:
            finished = token == self.chat.end or written >= self.limits.written_prompt
        else:
            finished = token == self.chat.end or written >= self.limits.answer
            if self.limits.stop_loops and not finished and written % 16 == 0:
                finished = loops(row.tokens[row.prompt_length :])
        if finished:
            self._finish(row)
            del self._live[slot]
            self._free.append(slot)

    def _finish(self, row: _Row) -> None:
        job = row.job
        if not job.write_prompt:
            self.emit(Text(row.tokens, row.prompt_length, job.kind, job.source))
            return
        if row.tokens[-1] != self.chat.end:
            return
        written = self.chat.decode(row.tokens[row.prompt_length : -1])
        text = (job.text + written).strip() + job.suffix
        if self.accept_prompt(text):
            answer = self._new_row(Job(text, job.kind, job.source))
            if answer is not None:
                self._ready.append(answer)
