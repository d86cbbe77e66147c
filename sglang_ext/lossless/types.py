"""What crosses the boundary between the checks and the servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

# A token by its id where the server tells it, else by its text.
Key = int | str
Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """What is asked. Exactly one of text, ids and messages is set.

    name: unique in a set, e.g. "code-3"; kind: "code", "chat", ...
    """

    name: str
    kind: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None

    def with_ids(self, ids: list[int]) -> Prompt:
        return replace(self, text=None, messages=None, ids=tuple(ids))


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters in neutral names; None is "not sent".

    regex, json_schema: grammars; min_tokens: tokens before a stop may occur
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    regex: str | None = None
    json_schema: str | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None

    def given(self) -> dict[str, Any]:
        """The parameters that are set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Token:
    """One answered token.

    logprob: of this token, None where the server gives none
    top: (token, log-probability), most likely first
    """

    key: Key
    logprob: float | None = None
    top: tuple[tuple[Key, float], ...] = ()


@dataclass(frozen=True)
class Drafts:
    """What the server says about its drafts: verification rounds and accepted drafts."""

    rounds: int = 0
    accepted: int = 0

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.rounds + other.rounds, self.accepted + other.accepted)


@dataclass(frozen=True)
class Answer:
    """One finished request. drafts: None where the server says nothing about them."""

    tokens: tuple[Token, ...]
    text: str
    finish: str
    completion_tokens: int
    drafts: Drafts | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(token.key for token in self.tokens)


@dataclass(frozen=True)
class Facts:
    """What a server says about itself.

    engine: "sglang", "vllm" or "openai"
    dtype: "float32", "bfloat16", ... or "unknown"
    algorithm: speculative algorithm, "" for none, None where it does not say
    """

    url: str
    engine: str
    model: str
    version: str = "unknown"
    dtype: str = "unknown"
    algorithm: str | None = None
    context: int | None = None
    vocab: int | None = None


class State(StrEnum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    NOT_SUPPORTED = "not supported"
    UNDECIDED = "could not test"


@dataclass(frozen=True)
class Outcome:
    """Result of one check.

    shown: one sentence on what was found; details: JSON-ready evidence
    """

    name: str
    group: str
    state: State
    shown: str
    details: dict[str, Any] = field(default_factory=dict)


def first_difference(left: tuple[Key, ...], right: tuple[Key, ...]) -> int | None:
    """Index of the first token that differs, or where one of them ends; None when equal."""
    for at, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))
