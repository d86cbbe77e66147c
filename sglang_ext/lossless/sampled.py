"""Sampled text: does token k, given what precedes it, follow the same law on both servers?

Each prompt is drawn N times on each side. Position k is compared inside strata of equal prefixes:
the whole prefix where it occurred often, else the last token, else one stratum for the rest. Under
equal laws each stratum is homogeneous, so their chi-squares add up. A family of tests (every
prompt and position, and every position over all prompts) is held to a family-wise error rate by
Holm; what is rejected is drawn again, twice as often, and must be rejected again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass

from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.flow import Flow, Side
from sglang_ext.lossless.statistics import EMPTY, Homogeneity, holm, homogeneity
from sglang_ext.lossless.types import Key, Outcome, Prompt, Sampling, State

Text = tuple[Key, ...]
# The first stage may be lax, since only what fails twice is reported.
FIRST_ALPHA, SECOND_ALPHA = 0.01, 0.001
# A prefix is a stratum of its own from so many observations on each side.
LEAST_IN_STRATUM = 40
ENDED: Key = "<end>"


@dataclass(frozen=True)
class SampledPlan:
    """samples: draws of each prompt on each side; depth: tokens compared; batch: at a time."""

    samples: int = 400
    depth: int = 6
    batch: int = 64


@dataclass(frozen=True)
class Test:
    """One hypothesis: the law of the token at `position` (0-based) after `prompt`."""

    prompt: str
    position: int
    found: Homogeneity


def sampled_check(
    name: str, prompts: Sequence[Prompt], sampling: Sampling, plan: SampledPlan
) -> Flow:
    """Compare the laws of `prompts` under `sampling`."""
    asked = list(prompts)
    base = yield from _draw_all(Side.BASE, asked, sampling, plan, plan.samples)
    spec = yield from _draw_all(Side.SPEC, asked, sampling, plan, plan.samples)
    tests = family(base, spec, plan.depth)
    suspects = [t for t, bad in zip(tests, holm(_p(tests), FIRST_ALPHA), strict=True) if bad]
    details: dict[str, object] = {
        "samples": plan.samples,
        "prompts": [p.name for p in asked],
        "sampling": sampling.given(),
        "tests": [_row(t) for t in tests],
        "power": power(tests),
        "alpha": {"first": FIRST_ALPHA, "second": SECOND_ALPHA, "procedure": "Holm"},
    }
    if not any(t.found.freedom for t in tests):
        shown = "every draw gave the same token on both sides; no law to compare"
        return Outcome(name, "sampled", State.UNDECIDED, shown, details)
    if not suspects:
        return Outcome(name, "sampled", State.PASS, _seen(tests), details)
    confirmed = yield from _confirm(asked, suspects, sampling, plan)
    details["confirmed"] = [_row(t) for t in confirmed]
    details["suspected"] = [_row(t) for t in suspects]
    if not confirmed:
        shown = f"{len(suspects)} suspected, none confirmed on fresh draws; {_seen(tests)}"
        return Outcome(name, "sampled", State.PASS, shown, details)
    worst = min(confirmed, key=lambda t: t.found.p_value)
    shown = (
        f"another law at {len(confirmed)} of {len(tests)} tests, seen again on fresh draws; worst: "
        f"{worst.prompt}, token {worst.position + 1}, p = {worst.found.p_value:.1e}"
    )
    return Outcome(name, "sampled", State.FAIL, shown, details)


def family(base: dict[str, list[Text]], spec: dict[str, list[Text]], depth: int) -> list[Test]:
    """Every prompt and position, then every position over all prompts."""
    tests = []
    for position in range(depth):
        together = EMPTY
        for prompt in base:
            found = conditional(base[prompt], spec[prompt], position)
            together = together + found
            tests.append(Test(prompt, position, found))
        if len(base) > 1:
            tests.append(Test("all prompts", position, together))
    return tests


def conditional(base: Sequence[Text], spec: Sequence[Text], position: int) -> Homogeneity:
    """Chi-square of the token at `position`, summed over strata of what precedes it."""
    stratum = _Strata(base, spec, position)
    left: dict[Text, Counter[Hashable]] = {}
    right: dict[Text, Counter[Hashable]] = {}
    for texts, side in ((base, left), (spec, right)):
        for text in texts:
            if len(text) < position:
                continue
            token = text[position] if position < len(text) else ENDED
            side.setdefault(stratum(text[:position]), Counter())[token] += 1
    found = EMPTY
    for key in left.keys() & right.keys():
        found = found + homogeneity(left[key], right[key])
    return found


class _Strata:
    """Maps a prefix to its stratum; a function of the prefix alone, the same for both sides."""

    def __init__(self, base: Sequence[Text], spec: Sequence[Text], position: int) -> None:
        whole, last = [], []
        for texts in (base, spec):
            prefixes = [text[:position] for text in texts if len(text) >= position]
            whole.append(Counter(prefixes))
            last.append(Counter(prefix[-1:] for prefix in prefixes))
        self.whole = {p for p in whole[0] if min(c[p] for c in whole) >= LEAST_IN_STRATUM}
        self.last = {p for p in last[0] if min(c[p] for c in last) >= LEAST_IN_STRATUM}

    def __call__(self, prefix: Text) -> Text:
        if prefix in self.whole:
            return (*prefix, "whole")
        if prefix[-1:] in self.last:
            return (*prefix[-1:], "last")
        return ("rest",)


def power(tests: Sequence[Test]) -> dict[str, dict[str, float]]:
    """Total-variation distance that a test of the first stage sees with 80 and 95 % chance.

    At the strictest level of Holm's procedure; per single test (its median and its worst) and, of
    a distance shared by all prompts, per position.
    """
    level = FIRST_ALPHA / max(len(tests), 1)
    result: dict[str, dict[str, float]] = {}
    for label, chance in (("80%", 0.8), ("95%", 0.95)):
        single = sorted(
            t.found.visible_distance(level, chance)
            for t in tests
            if t.prompt != "all prompts" and t.found.freedom
        )
        shared = [
            t.found.visible_distance(level, chance)
            for t in tests
            if t.prompt == "all prompts" and t.found.freedom
        ]
        result[label] = {}
        if single:
            result[label] |= {"median": single[len(single) // 2], "worst": single[-1]}
        if shared:
            result[label]["all prompts"] = max(shared)
    return result


def _draw_all(
    side: Side, prompts: Sequence[Prompt], sampling: Sampling, plan: SampledPlan, count: int
) -> Generator[Side, Endpoint, dict[str, list[Text]]]:
    endpoint = yield side
    texts: dict[str, list[Text]] = {}
    for prompt in prompts:
        drawn: list[Text] = []
        while len(drawn) < count:
            batch = min(plan.batch, count - len(drawn))
            answers = endpoint.draw(endpoint.resolved(prompt), sampling, batch)
            drawn += [answer.keys[: plan.depth] for answer in answers]
        texts[prompt.name] = drawn
    return texts


def _confirm(
    prompts: Sequence[Prompt], suspects: Sequence[Test], sampling: Sampling, plan: SampledPlan
) -> Generator[Side, Endpoint, list[Test]]:
    """Which of the suspects fail again on twice as many fresh draws."""
    names = {t.prompt for t in suspects}
    chosen = [p for p in prompts if p.name in names or "all prompts" in names]
    base = yield from _draw_all(Side.BASE, chosen, sampling, plan, 2 * plan.samples)
    spec = yield from _draw_all(Side.SPEC, chosen, sampling, plan, 2 * plan.samples)
    where = {(t.prompt, t.position) for t in suspects}
    again = [t for t in family(base, spec, plan.depth) if (t.prompt, t.position) in where]
    return [t for t, bad in zip(again, holm(_p(again), SECOND_ALPHA), strict=True) if bad]


def _p(tests: Sequence[Test]) -> list[float]:
    return [t.found.p_value for t in tests]


def _row(test: Test) -> dict[str, object]:
    return {
        "prompt": test.prompt,
        "position": test.position + 1,
        "p": test.found.p_value,
        "chi_square": test.found.statistic,
        "degrees_of_freedom": test.found.freedom,
        "observations": [test.found.left, test.found.right],
    }


def _seen(tests: Sequence[Test]) -> str:
    chances = power(tests)
    common = "all prompts" in chances["80%"]
    kind = "shared by all prompts" if common else "in the median test"
    key = "all prompts" if common else "median"
    seen = ", ".join(f"{values[key]:.3f} ({label})" for label, values in chances.items())
    return (
        f"{len(tests)} tests, least p = {min(_p(tests)):.2g}; a total-variation distance of {seen} "
        f"{kind} would have been seen"
    )
