"""Each sampling parameter acts on speculative text as on the base's.

A parameter counts as tested only where it is seen to act on the base: a server that ignores it is
reported as not supporting it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.errors import RefusedRequest
from sglang_ext.lossless.flow import Flow, Side
from sglang_ext.lossless.greedy import Reference, judged, verdict
from sglang_ext.lossless.margins import TOPS, Judge, contenders
from sglang_ext.lossless.types import Answer, Outcome, Prompt, Sampling, State

GROUP = "parameters"
CONCURRENCY = 4

# free answers of the base and their parameters -> the parameters to test with, None to leave out
Make = Callable[[Answer, Sampling], Sampling | None]
# (free answer, answer under the parameter, its parameters, nats that count as rounding) -> whether
# the parameter acted
Acted = Callable[[Answer, Answer, Sampling, float], bool]
# (parameters, an answer) -> what is wrong with it whatever the base says, or None
Law = Callable[[Sampling, Answer], str | None]


def _differs(free: Answer, held: Answer, _: Sampling, __: float) -> bool:
    return free.keys != held.keys


def _is_greedy(free: Answer, held: Answer, _: Sampling, bound: float) -> bool:
    """The greedy answer, or one of tokens that are each the likeliest up to rounding."""
    gaps = [t.top[0][1] - t.logprob for t in held.tokens if t.logprob is not None and t.top]
    if free.keys == held.keys:
        return True
    # An empty answer shows no choice at all.
    return bool(gaps) and len(gaps) == len(held.tokens) and max(gaps) <= bound


def _ended(_: Answer, held: Answer, __: Sampling, ___: float) -> bool:
    return held.finish == "stop"


def _obeys(law: Law) -> Acted:
    return lambda free, held, sampling, bound: law(sampling, held) is None


def _no_law(_: Sampling, __: Answer) -> str | None:
    return None


@dataclass(frozen=True)
class Case:
    """One parameter, greedy or made greedy by its filter.

    every: the parameter must act on every answer of the base, not on any
    """

    name: str
    make: Make
    acted: Acted
    law: Law = _no_law
    every: bool = False


def _stop_string(free: Answer, plain: Sampling) -> Sampling | None:
    """The plainest string of the free answer, from its middle on where there is one."""
    text = free.text
    order = [*range(len(text) // 2, len(text)), *range(len(text) // 2)]
    for length in (3, 2, 1):
        for at in order:
            stop = text[at : at + length]
            if len(stop) == length and stop.isascii() and stop.isalnum():
                return replace(plain, stop=(stop,))
    return None


def _stopped(sampling: Sampling, answer: Answer) -> str | None:
    stop = (sampling.stop or ("",))[0]
    return f"the stop string {stop!r} is in the text" if stop in answer.text else None


def _stop_token(free: Answer, plain: Sampling) -> Sampling | None:
    key = free.keys[len(free.keys) // 2] if free.keys else None
    return replace(plain, stop_token_ids=(key,)) if isinstance(key, int) else None


def _ban(free: Answer, plain: Sampling) -> Sampling | None:
    """Forbid the token that the free answer uses most."""
    key = Counter(free.keys).most_common(1)[0][0] if free.keys else None
    return replace(plain, logit_bias=((key, -100.0),)) if isinstance(key, int) else None


def _unbanned(sampling: Sampling, answer: Answer) -> str | None:
    (key, _), *_ = sampling.logit_bias or ((None, 0.0),)
    return f"banned token {key} was said" if key in answer.keys else None


def _short(free: Answer, plain: Sampling) -> Sampling | None:
    count = len(free.keys)
    return replace(plain, max_tokens=max(1, count // 3)) if count > 3 else None


def _length(sampling: Sampling, answer: Answer) -> str | None:
    most = sampling.max_tokens
    count = answer.completion_tokens
    return None if count <= most else f"{count} tokens where {most} were allowed"


PATTERN = r"[a-f]{2,9}(-[0-9]{1,4}){3} (yes|no|maybe)"
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["id", "ok", "kind"],
    "additionalProperties": False,
}


def _matches(_: Sampling, answer: Answer) -> str | None:
    if answer.finish == "length" or re.fullmatch(PATTERN, answer.text):
        return None
    return f"{answer.text[:80]!r} does not match the expression"


def _is_schema(_: Sampling, answer: Answer) -> str | None:
    if answer.finish == "length":
        return None
    try:
        value = json.loads(answer.text)
    except ValueError:
        return f"{answer.text[:80]!r} is no JSON"
    kinds: dict[str, Callable[[Any], bool]] = {
        "id": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "ok": lambda v: isinstance(v, bool),
        "kind": lambda v: v in ("alpha", "beta", "gamma"),
    }
    valid = isinstance(value, dict) and set(value) == set(kinds)
    if valid and all(check(value[name]) for name, check in kinds.items()):
        return None
    return f"{answer.text[:80]!r} does not fit the schema"


def _with(**changes: Any) -> Make:
    return lambda _, plain: replace(plain, **changes)


CASES = (
    Case("stop string", _stop_string, _ended, _stopped),
    Case("stop token", _stop_token, _ended),
    Case("frequency penalty", _with(frequency_penalty=0.8), _differs),
    Case("presence penalty", _with(presence_penalty=0.9), _differs),
    Case("repetition penalty", _with(repetition_penalty=1.3), _differs),
    Case("logit bias", _ban, _obeys(_unbanned), _unbanned, every=True),
    Case("top-k 1 is greedy", _with(temperature=1.0, top_k=1), _is_greedy, every=True),
    Case("min-p 1 is greedy", _with(temperature=1.0, min_p=1.0), _is_greedy, every=True),
    Case("tiny top-p is greedy", _with(temperature=1.0, top_p=1e-6), _is_greedy, every=True),
    Case("max tokens", _short, _obeys(_length), _length, every=True),
    Case("regex", _with(regex=PATTERN), _obeys(_matches), _matches, every=True),
    Case(
        "JSON schema",
        _with(json_schema=json.dumps(SCHEMA), max_tokens=96),
        _obeys(_is_schema),
        _is_schema,
        every=True,
    ),
)
# Laws that hold for sampled answers as well.
_ALSO_SAMPLED = ("stop string", "logit bias", "max tokens", "regex", "JSON schema")


def parameter_check(
    case: Case, prompts: Sequence[Prompt], plain: Sampling, reference: Reference
) -> Flow:
    """Base and speculation under one parameter."""
    free = [reference.answers[p.name] for p in prompts]
    made = [(p, f, case.make(f, plain)) for p, f in zip(prompts, free, strict=True)]
    asked = [(p, f, s) for p, f, s in made if s is not None]
    if not asked:
        shown = "the base's answers give nothing to test it with (no ids, or no text)"
        return Outcome(case.name, GROUP, State.NOT_SUPPORTED, shown)
    pairs = [(p, s) for p, _, s in asked]
    base = yield Side.BASE
    try:
        expected = base.ask_all(pairs, CONCURRENCY, tops=TOPS)
    except RefusedRequest as refusal:
        return Outcome(case.name, GROUP, State.NOT_SUPPORTED, f"refused by the base: {refusal}")
    nats = reference.bound.nats
    acted = [case.acted(f, e, s, nats) for (_, f, s), e in zip(asked, expected, strict=True)]
    # A near-tie may part one answer from the free one; ignoring the parameter parts most.
    if not (sum(acted) > len(acted) / 2 if case.every else any(acted)):
        shown = f"no effect on the base's answers ({sum(acted)} of {len(acted)})"
        return Outcome(case.name, GROUP, State.NOT_SUPPORTED, shown)
    spec = yield Side.SPEC
    hot = [(p, replace(s, temperature=1.0)) for p, s in pairs]
    try:
        found = spec.ask_all(pairs, CONCURRENCY)
        sampled = spec.ask_all(hot, CONCURRENCY) if case.name in _ALSO_SAMPLED else []
    except RefusedRequest as refusal:
        shown = f"refused by the speculative server: {refusal}"
        return Outcome(case.name, GROUP, State.NOT_SUPPORTED, shown)
    broken = _broken(case, pairs, found) + _broken(case, hot, sampled)
    if broken:
        return Outcome(case.name, GROUP, State.FAIL, broken[0], {"broken": broken})
    base = yield Side.BASE
    judge = Judge(base, reference.bound, rescore=False)
    divergences = judged(judge, [p for p, _ in pairs], expected, found, CONCURRENCY)
    scope = f"{len(pairs)} answers, {sum(acted)} of them changed or held by it"
    return verdict(case.name, GROUP, divergences, scope)


def _broken(
    case: Case, asked: Sequence[tuple[Prompt, Sampling]], answers: Sequence[Answer]
) -> list[str]:
    rows = zip(asked, answers, strict=False)
    found = [(p, case.law(s, a)) for (p, s), a in rows]
    return [f"{prompt.name}: {problem}" for prompt, problem in found if problem]


def seed_check(prompts: Sequence[Prompt], tokens: int) -> Flow:
    """The same seed twice gives the same text; another seed another."""
    name = "seed"
    asked = [(p, Sampling(tokens, temperature=1.0, seed=11)) for p in prompts]
    others = [(p, replace(s, seed=12)) for p, s in asked]
    base = yield Side.BASE
    ours = _repeats(base, asked, others)
    spec = yield Side.SPEC
    theirs = _repeats(spec, asked, others)
    details = {"base": ours, "spec": theirs}
    if theirs == "repeats":
        shown = "the same text run to run, alone and in company"
        shown += "" if ours == "repeats" else f"; on the base itself: {ours}"
        return Outcome(name, GROUP, State.PASS, shown, details)
    state = State.FAIL if ours == "repeats" else State.NOT_SUPPORTED
    return Outcome(name, GROUP, state, f"speculation: {theirs}; the base: {ours}", details)


def _repeats(
    endpoint: Endpoint,
    asked: Sequence[tuple[Prompt, Sampling]],
    others: Sequence[tuple[Prompt, Sampling]],
) -> str:
    try:
        first = [a.keys for a in endpoint.ask_all(asked, 1)]
        second = [a.keys for a in endpoint.ask_all(asked, CONCURRENCY)]
        third = [a.keys for a in endpoint.ask_all(others, CONCURRENCY)]
    except RefusedRequest as refusal:
        return f"refused ({refusal})"
    if first != second:
        return "another text for the same seed"
    return "the same text for every seed" if first == third else "repeats"


def logprob_check(prompts: Sequence[Prompt], plain: Sampling, reference: Reference) -> Flow:
    """Reported log-probabilities: the base's within the bound, and those of the reported tokens."""
    spec = yield Side.SPEC
    try:
        answers = spec.ask_all([(p, plain) for p in prompts], CONCURRENCY, tops=TOPS)
    except RefusedRequest as refusal:
        shown = f"refused by the speculative server: {refusal}"
        return Outcome("log-probabilities", GROUP, State.NOT_SUPPORTED, shown)
    worst, count, problems = 0.0, 0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        base = reference.answers[prompt.name]
        for at, (mine, theirs) in enumerate(zip(answer.tokens, base.tokens, strict=False)):
            if mine.logprob is None or theirs.logprob is None:
                break
            problem = _inconsistent(mine.logprob, mine.top, mine.key)
            if problem:
                problems.append(f"{prompt.name}, token {at + 1}: {problem}")
            listed = dict(theirs.top) | {theirs.key: theirs.logprob}
            shared = [(v, listed[k]) for k, v in contenders(mine) if k in listed]
            worst = max([worst, *(abs(a - b) for a, b in shared)])
            count += len(shared)
            if mine.key != theirs.key:
                break
    details = {"compared": count, "largest_difference": worst, "problems": problems}
    shown = f"{count} values, largest difference {worst:.2g} nats"
    if not count:
        shown = "no log-probabilities to compare"
        return Outcome("log-probabilities", GROUP, State.NOT_SUPPORTED, shown, details)
    if problems:
        shown = f"{problems[0]} (and {len(problems) - 1} more)"
        return Outcome("log-probabilities", GROUP, State.FAIL, shown, details)
    state = State.PASS if worst <= reference.bound.nats else State.FAIL
    return Outcome("log-probabilities", GROUP, state, shown, details)


def _inconsistent(value: float, top: Sequence[tuple[Any, float]], key: Any) -> str | None:
    """What contradicts itself in the report of one position."""
    from math import exp

    total = sum(exp(v) for _, v in top)
    if total > 1.0 + 1e-3:
        return f"the listed probabilities add up to {total:.4f}"
    listed = dict(top).get(key)
    if listed is not None and abs(listed - value) > 1e-4:
        return f"the token is reported with {value:.4f} and listed with {listed:.4f}"
    if value > top[0][1] + 1e-4 if top else False:
        return "the token is more likely than the most likely one"
    return None
