"""Is a greedy divergence explained by rounding? The base's own log-probabilities decide.

At the first token that differs both servers have seen the same tokens, so the base's
log-probabilities at that position say how much it preferred its own choice: the gap. A matrix
product over one row and over eight may round differently, which moves a log-probability by a
little; a gap within that is explained, any other is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.types import Answer, Key, Prompt, Sampling, Token, first_difference

TOPS = 20
# (least, greatest) bound in nats by the dtype of the served model. The least is a few units in the
# last place of a logit of magnitude 16 to 32; the greatest is where a difference stops being
# rounding whatever was measured: 2 x 2 such units for bf16 and fp16, 1e-2 for fp32.
LIMITS = {
    "float32": (1e-4, 1e-2),
    "float16": (4e-3, 6.25e-2),
    "bfloat16": (2e-2, 0.5),
    "unknown": (2e-2, 0.5),
}
# The gap is a difference of two log-probabilities, and a verification has row counts that the
# measurement of the base against itself did not have: twice each.
SAFETY = 4.0
# Nats below the most likely token: four times the greatest bound.
CONTENDER = 2.0


@dataclass(frozen=True)
class Bound:
    """The greatest gap that counts as rounding, in nats, and where it comes from."""

    nats: float
    source: str

    @classmethod
    def measured(cls, spread: float, dtype: str) -> Bound:
        """From the spread of the base against itself, kept inside the limits of the dtype."""
        least, greatest = LIMITS.get(dtype, LIMITS["unknown"])
        nats = min(max(SAFETY * spread, least), greatest)
        how = f"{SAFETY:g} x the spread of the base against itself ({spread:.2g} nats)"
        if nats == least:
            how += f", raised to the least for {dtype}"
        elif nats == greatest:
            how += f", cut to the greatest for {dtype}"
        return cls(nats, how)


@dataclass(frozen=True)
class Divergence:
    """The first token at which an answer leaves the base's.

    gap:    nats by which the base preferred its own token, None where it cannot be told
    margin: nats between the base's two most likely tokens there
    explained: True, False, or None where the log-probabilities are not those that chose the token
    later_outside: tokens after it that the base, given the text so far, would not have chosen
    base_text, spec_text: both answers around the place where their texts part
    """

    prompt: str
    concurrency: int
    position: int
    base_token: Key | None
    spec_token: Key | None
    gap: float | None
    margin: float | None
    explained: bool | None
    later_outside: int = 0
    note: str = ""
    base_text: str = ""
    spec_text: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# Characters of an answer that are shown before and from the place where two texts part.
BEFORE, AFTER = 12, 16


def parted(left: str, right: str) -> tuple[str, str]:
    """What both say around the first character that differs, cuts marked."""
    apart = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    at = next(apart, min(len(left), len(right)))

    def around(text: str) -> str:
        start, end = max(0, at - BEFORE), at + AFTER
        return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")

    return around(left), around(right)


def gap_between(token: Token, other: Key) -> float | None:
    """Nats from `other` up to the chosen token; a lower bound where `other` is not listed.

    None where the list ends with the chosen token itself, which bounds nothing.
    """
    if token.logprob is None or not token.top:
        return None
    listed = dict(token.top)
    if other not in listed and len(listed) == 1:
        return None
    return token.logprob - listed.get(other, token.top[-1][1])


def top_two(token: Token) -> float | None:
    """Nats between the two most likely tokens."""
    return token.top[0][1] - token.top[1][1] if len(token.top) > 1 else None


def margins(answer: Answer) -> list[float | None]:
    """`top_two` of every token to four digits; None where it is not told."""
    told = (top_two(token) for token in answer.tokens)
    return [None if m is None or not math.isfinite(m) else float(f"{m:.4g}") for m in told]


def contenders(token: Token) -> list[tuple[Key, float]]:
    """The listed tokens that rounding could make the choice, with room: near the most likely.

    Rounding moves unlikely tokens further than these, and no answer depends on them.
    """
    least = token.top[0][1] - CONTENDER if token.top else 0.0
    return [(key, value) for key, value in token.top if value >= least]


def spread(left: Answer, right: Answer) -> float:
    """Greatest difference of a contender's log-probability while both have seen the same tokens."""
    same = first_difference(left.keys, right.keys)
    count = min(len(left.tokens), len(right.tokens)) if same is None else same + 1
    most = 0.0
    for a, b in zip(left.tokens[:count], right.tokens[:count], strict=False):
        theirs = dict(b.top)
        for key, value in contenders(a):
            other = theirs.get(key)
            if other is not None and math.isfinite(value) and math.isfinite(other):
                most = max(most, abs(value - other))
    return most


class Judge:
    """Classifies divergences by asking the base again.

    rescore: ask for the position once more, the common prefix as prompt; off where a parameter
    makes the choice depend on which tokens are output and which are prompt.
    """

    def __init__(self, base: Endpoint, bound: Bound, *, rescore: bool = True) -> None:
        self.base, self.bound, self.rescore = base, bound, rescore

    def compare(
        self, prompt: Prompt, expected: Answer, found: Answer, concurrency: int
    ) -> Divergence | None:
        """None where the answers are equal."""
        at = first_difference(expected.keys, found.keys)
        if at is None:
            divergence = self._same_tokens(prompt, expected, found, concurrency)
        else:
            divergence = self._classified(prompt, expected, found, at, concurrency)
        if divergence is None:
            return None
        base_text, spec_text = parted(expected.text, found.text)
        return replace(divergence, base_text=base_text, spec_text=spec_text)

    def _classified(
        self, prompt: Prompt, expected: Answer, found: Answer, at: int, concurrency: int
    ) -> Divergence:
        """at: the first token that differs"""
        ours = expected.tokens[at].key if at < len(expected.tokens) else None
        theirs = found.keys[at] if at < len(found.tokens) else None
        if ours is None:
            return Divergence(
                prompt.name,
                concurrency,
                at,
                None,
                theirs,
                None,
                None,
                False,
                note=f"the base ended here ({expected.finish}), speculation went on",
            )
        token = expected.tokens[at]
        gaps = [self._gap(token, theirs)]
        if self.rescore:
            gaps.append(self._rescored(prompt, expected.keys[:at], ours, theirs))
        known = [gap for gap in gaps if gap is not None]
        gap = min(known, key=abs) if known else None
        explained: bool | None = gap is not None and abs(gap) <= self.bound.nats
        note = ""
        if gap is None:
            explained, note = None, "the base gives no log-probabilities"
        elif not self.rescore and self._not_the_argmax(token):
            explained, note = None, "the base's log-probabilities are not those it chose by"
        elif theirs is None:
            note = f"speculation ended here ({found.finish}); the gap is the top-2 margin"
        later = self._later(prompt, found, at) if explained else 0
        return Divergence(
            prompt.name,
            concurrency,
            at,
            ours,
            theirs,
            gap,
            top_two(token),
            False if later else explained,
            later,
            note,
        )

    def _same_tokens(
        self, prompt: Prompt, expected: Answer, found: Answer, concurrency: int
    ) -> Divergence | None:
        """Equal tokens must come with equal text, reason and usage."""
        for what in ("text", "finish", "completion_tokens"):
            a, b = getattr(expected, what), getattr(found, what)
            if a != b:
                return Divergence(
                    prompt.name,
                    concurrency,
                    len(expected.tokens),
                    None,
                    None,
                    None,
                    None,
                    False,
                    note=f"equal tokens, other {what}: {a!r} and {b!r}"[:300],
                )
        return None

    def _gap(self, token: Token, theirs: Key | None) -> float | None:
        # An end that is no token of the text is at best the second choice.
        return top_two(token) if theirs is None else gap_between(token, theirs)

    def _not_the_argmax(self, token: Token) -> bool:
        return bool(
            token.top
            and token.logprob is not None
            and token.top[0][1] - token.logprob > self.bound.nats
        )

    def _rescored(
        self, prompt: Prompt, prefix: Sequence[Key], ours: Key, theirs: Key | None
    ) -> float | None:
        again = self.base.continued(self.base.resolved(prompt), prefix)
        if again is None or theirs is None:
            return None
        answer = self.base.ask(again, Sampling(1, ignore_eos=True), tops=TOPS)
        listed = dict(answer.tokens[0].top) if answer.tokens else {}
        if ours not in listed:
            return None
        return listed[ours] - listed.get(theirs, min(listed.values()))

    def _later(self, prompt: Prompt, found: Answer, at: int) -> int:
        """Tokens behind an explained divergence that the base would not have chosen either."""
        if not self.rescore:
            return 0
        rows = self.base.scores(self.base.resolved(prompt), found.keys, 1)
        return sum(
            row.logprob is not None
            and bool(row.top)
            and row.top[0][1] - row.logprob > self.bound.nats
            for row in (rows or [])[at + 1 :]
        )
