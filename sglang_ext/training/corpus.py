"""What the training text is made of: given prompts, variations of them, and written ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ext.training.generate import Job
from sglang_ext.training.prompts import STEP_BY_STEP, Kind, NearCopies, Prompt, opening, vary

DEFAULT_WEIGHTS: dict[Kind, float] = {"math": 0.4, "code": 0.3, "chat": 0.3}

CODE_STARTERS = (
    "Write a python function to",
    "Write a function to",
    "Write a function that",
    "Write a python function that takes",
    "Write a python function to find",
    "Write a python function to check",
    "Write a function to count",
    "Write a Python program that",
    "Implement a function",
    "Create a Python class",
    "Write a SQL query",
    "Write a JavaScript function",
    "Write a C++ program",
    "Fix the bug in this code:\n\n```python\n",
    "Explain what this code does:\n\n```python\n",
    "Complete the following python function:\n\n```python\ndef",
)
CHAT_STARTERS = (
    "How", "What", "Can you", "Explain", "Write a", "Why", "Describe", "Give me", "Compose",
    "Draft", "Imagine you are", "Compare", "Summarize", "I need", "Please", "Could you", "Suggest",
    "Create a", "List", "Help me", "Rewrite", "Is it", "My", "Design",
)  # fmt: skip
MATH_STARTERS = (
    "What is the", "Find the", "Solve", "Compute", "How many", "If $", "Let", "A train", "Simplify",
    "Evaluate", "A store", "There are", "Convert",
)  # fmt: skip


@dataclass
class Corpus:
    """An endless stream of jobs in about the proportions of `weights`.

    Given prompts come once each, mixed with made ones. No job repeats a prompt, and no job is a
    near copy of a held-out prompt.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    weights: dict[Kind, float]
    seed: int = 0
    given_share: float = 0.5

    def __post_init__(self) -> None:
        self._copies = NearCopies(prompt.text for prompt in self.held_out)
        self._seen: set[str] = set()
        self._by_kind: dict[Kind, list[Prompt]] = {
            kind: [prompt for prompt in self.train if prompt.kind == kind] for kind in self.weights
        }

    def accept(self, text: str) -> bool:
        """Take in a prompt unless it is short, already there or near a held-out one."""
        if len(text.removesuffix(STEP_BY_STEP).split()) < 3 or text in self._seen:
            return False
        if self._copies.contains(text):
            return False
        self._seen.add(text)
        return True

    def skip(self, texts: Iterator[str]) -> None:
        """Mark prompts as done, so that a resumed run does not answer them again."""
        self._seen.update(texts)

    def jobs(self) -> Iterator[Job]:
        """The stream; it never ends."""
        rng = random.Random(self.seed)
        queues = {kind: rng.sample(given, len(given)) for kind, given in self._by_kind.items()}
        while True:
            kind = rng.choices(list(self.weights), list(self.weights.values()))[0]
            if queues[kind] and rng.random() < self.given_share:
                prompt = queues[kind].pop()
                job = Job(prompt.text, kind, prompt.source)
            else:
                job = self._make(kind, rng)
            if job.write_prompt or self.accept(job.text):
                yield job

    def _make(self, kind: Kind, rng: random.Random) -> Job:
        starters = {"math": MATH_STARTERS, "code": CODE_STARTERS, "chat": CHAT_STARTERS}[kind]
        suffix = STEP_BY_STEP if kind == "math" else ""
        choice = rng.random()
        if kind == "chat" and choice < 0.45:
            return Job("", kind, "written", write_prompt=True)
        if not self._by_kind[kind] or choice > 0.85:
            return Job(rng.choice(starters), kind, "written", write_prompt=True, suffix=suffix)
        base = rng.choice(self._by_kind[kind])
        varied = vary(base.text, rng)
        if kind == "math" and choice < 0.55 and varied != base.text:
            return Job(varied, kind, f"{base.source}-varied")
        if kind == "code" and choice < 0.4:
            return Job(rng.choice(starters), kind, "written", write_prompt=True, suffix=suffix)
        text = opening(varied, rng)
        return Job(text, kind, f"{base.source}-opening", write_prompt=True, suffix=suffix)
