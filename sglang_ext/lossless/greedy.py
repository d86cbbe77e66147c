"""Greedy identity: with and without speculation the same tokens, or a reason in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_ext.lossless.endpoint import Endpoint, Tick
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.flow import Flow, Side
from sglang_ext.lossless.margins import LIMITS, TOPS, Bound, Divergence, Judge, margins, spread
from sglang_ext.lossless.types import Answer, Outcome, Prompt, Sampling, State, first_difference


@dataclass(frozen=True)
class Reference:
    """The base's own greedy answers, and how far it agrees with itself.

    answers: prompt name -> answer, asked one at a time
    spread_same, spread_batched: greatest difference of a log-probability, in nats, against a
        second run one at a time and against a run at the greatest concurrency
    diverged_same, diverged_batched: answers whose tokens differed there
    """

    answers: Mapping[str, Answer]
    spread_same: float
    spread_batched: float
    diverged_same: int
    diverged_batched: int
    dtype: str
    bound: Bound

    @property
    def outcome(self) -> Outcome:
        """The base against itself; nothing can be compared where it does not agree."""
        most = max(self.spread_same, self.spread_batched)
        greatest = LIMITS.get(self.dtype, LIMITS["unknown"])[1]
        count = len(self.answers)
        shown = (
            f"{self.diverged_same} of {count} answers differ one at a time, "
            f"{self.diverged_batched} together; log-probabilities within {most:.2g} nats; "
            f"bound {self.bound.nats:.2g} nats: {self.bound.source}"
        )
        details = {
            "spread_same": self.spread_same,
            "spread_batched": self.spread_batched,
            "diverged_same": self.diverged_same,
            "diverged_batched": self.diverged_batched,
            "deterministic": not self.diverged_same and self.spread_same == 0.0,
            "bound": self.bound.nats,
            "bound_source": self.bound.source,
            "dtype": self.dtype,
            "margins": [margins(answer) for answer in self.answers.values()],
        }
        state = State.PASS if most <= greatest else State.UNDECIDED
        if state is State.UNDECIDED:
            shown = f"the base does not agree with itself, so nothing can be compared: {shown}"
        return Outcome("base against itself", "noise", state, shown, details)


def measure_reference(
    base: Endpoint,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    concurrency: int,
    dtype: str,
    bound: float | None,
    again: int,
    tick: Tick = lambda: None,
) -> Reference:
    """Ask the base for its answers, then again. again: prompts of the second and third run."""
    asked = [(p, sampling) for p in prompts]
    first = base.ask_all(asked, 1, tops=TOPS, tick=tick)
    if not any(answer.tokens for answer in first):
        raise CannotTest(
            base.facts.url,
            expected="answers with tokens",
            found="empty answers to every prompt",
            remedy="Check that the server generates text, or give other --prompts.",
        )
    second = base.ask_all(asked[:again], 1, tops=TOPS, tick=tick)
    crowd = base.ask_all(asked[:again], concurrency, tops=TOPS, tick=tick)
    same = [spread(a, b) for a, b in zip(first, second, strict=False)]
    batched = [spread(a, b) for a, b in zip(first, crowd, strict=False)]
    most = max([*same, *batched])
    found = Bound.measured(most, dtype) if bound is None else Bound(bound, "given")
    return Reference(
        {p.name: a for p, a in zip(prompts, first, strict=True)},
        max(same),
        max(batched),
        _differing(first, second),
        _differing(first, crowd),
        dtype,
        found,
    )


def greedy_check(
    prompts: Sequence[Prompt], sampling: Sampling, reference: Reference, concurrency: int
) -> Flow:
    """All prompts on the speculative server, `concurrency` at a time."""
    spec = yield Side.SPEC
    answers = spec.ask_all([(p, sampling) for p in prompts], concurrency)
    expected = [reference.answers[p.name] for p in prompts]
    base = yield Side.BASE
    judge = Judge(base, reference.bound)
    found = judged(judge, prompts, expected, answers, concurrency)
    tokens = sum(len(a.tokens) for a in answers)
    name = f"greedy, {concurrency} at a time"
    return verdict(name, "greedy", found, f"{len(prompts)} answers, {tokens} tokens")


def repeated_check(
    prompt: Prompt, sampling: Sampling, reference: Reference, count: int, concurrency: int
) -> Flow:
    """One prompt `count` times, `concurrency` at a time: every answer must be the base's."""
    spec = yield Side.SPEC
    answers = spec.ask_all([(prompt, sampling)] * count, concurrency)
    base = yield Side.BASE
    judge, expected = Judge(base, reference.bound), reference.answers[prompt.name]
    found = judged(judge, [prompt] * count, [expected] * count, answers, concurrency)
    kinds = len({answer.keys for answer in answers})
    scope = f"the same prompt {count} times, {kinds} different answer{'s' * (kinds != 1)}"
    return verdict(f"greedy, one prompt {count} times", "greedy", found, scope)


def judged(
    judge: Judge,
    prompts: Sequence[Prompt],
    expected: Sequence[Answer],
    found: Sequence[Answer],
    concurrency: int,
) -> list[Divergence]:
    """Every answer that is not the base's."""
    rows = zip(prompts, expected, found, strict=True)
    compared = (judge.compare(p, a, b, concurrency) for p, a, b in rows)
    return [divergence for divergence in compared if divergence is not None]


def verdict(name: str, group: str, found: Sequence[Divergence], scope: str) -> Outcome:
    """Fail on any unexplained divergence; undecided where one could not be classified."""
    bad = [d for d in found if d.explained is False]
    unclear = [d for d in found if d.explained is None]
    details = {"divergences": [d.as_json() for d in found]}
    if bad:
        first = min(bad, key=lambda d: d.position)
        gap = "" if first.gap is None else f", the base preferred its own by {first.gap:.3g} nats"
        more = f" ({first.note})" if first.note else ""
        shown = (
            f"{len(bad)} unexplained of {scope}; first: {first.prompt} at token "
            f"{first.position + 1}{gap}{more}"
        )
        return Outcome(name, group, State.FAIL, shown, details)
    if unclear:
        shown = f"{len(unclear)} differences could not be classified: {unclear[0].note}; {scope}"
        return Outcome(name, group, State.UNDECIDED, shown, details)
    largest = max((abs(d.gap) for d in found if d.gap is not None), default=0.0)
    ties = f", {len(found)} explained by rounding (largest gap {largest:.2g} nats)" if found else ""
    return Outcome(name, group, State.PASS, f"{scope}: the base's{ties}", details)


def _differing(left: Sequence[Answer], right: Sequence[Answer]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(first_difference(a.keys, b.keys) is not None for a, b in pairs)
