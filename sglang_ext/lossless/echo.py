"""Identifiers that must be copied: where one wrong character goes unseen by every other test.

Users report identifiers copied from the prompt that come back one character wrong. Each answer is
held against the base's, token by token, and the identifiers are counted on both sides.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence

from scipy.stats import binomtest

from sglang_ext.lossless.flow import Flow, Side
from sglang_ext.lossless.greedy import judged, verdict
from sglang_ext.lossless.margins import TOPS, Bound, Judge
from sglang_ext.lossless.types import Answer, Outcome, Prompt, Sampling, State

_PARTS = ("srv", "lib", "core", "data", "node", "cache", "index", "shard", "logs", "build")
# Chance of a false alarm of the comparison of rates, beside the exact comparison of tokens.
_ALPHA = 1e-4


def _hex(rng: random.Random) -> str:
    return f"{rng.getrandbits(64):016x}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _path(rng: random.Random) -> str:
    middle = "/".join(rng.choices(_PARTS, k=3))
    return f"/{middle}/{rng.getrandbits(20):05x}_{rng.randint(1, 99)}.{rng.choice(('py', 'json'))}"


_KINDS: dict[str, Callable[[random.Random], str]] = {"hex": _hex, "uuid": _uuid, "path": _path}


def echo_prompts(count: int, each: int, seed: int) -> list[tuple[Prompt, list[str]]]:
    """`count` prompts with the identifiers that each asks to copy."""
    rng = random.Random(seed)
    result = []
    for n in range(count):
        kind = list(_KINDS)[n % len(_KINDS)]
        names = [_KINDS[kind](rng) for _ in range(each)]
        lines = "\n".join(names)
        text = f"Original list:\n{lines}\n\nThe same list, copied exactly:\n{names[0]}\n"
        result.append((Prompt(f"echo-{kind}-{n}", "echo", text=text), names[1:]))
    return result


def echo_check(
    asked: Sequence[tuple[Prompt, list[str]]], tokens: int, concurrency: int, bound: Bound
) -> Flow:
    """Base and speculation copy the same lists; compared by token and by identifier."""
    prompts, sampling = [prompt for prompt, _ in asked], Sampling(tokens)
    base = yield Side.BASE
    expected = base.ask_all([(p, sampling) for p in prompts], concurrency, tops=TOPS)
    spec = yield Side.SPEC
    found = spec.ask_all([(p, sampling) for p in prompts], concurrency)
    base = yield Side.BASE
    divergences = judged(Judge(base, bound), prompts, expected, found, concurrency)
    names = [names for _, names in asked]
    ours, theirs = _copied(expected, names), _copied(found, names)
    lost = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    won = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    scope = (
        f"{len(ours)} identifiers in {len(prompts)} prompts; the base copied {sum(ours)}, "
        f"speculation {sum(theirs)} ({lost} lost)"
    )
    if not sum(ours):
        scope += "; the base copies none, so only the comparison of tokens says something"
    outcome = verdict("identifier echo", "echo", divergences, scope)
    # McNemar's exact test: of the identifiers that one side copied and the other did not, half.
    p = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    details = outcome.details | {
        "identifiers": len(ours),
        "base_copied": sum(ours),
        "spec_copied": sum(theirs),
        "lost": lost,
        "won": won,
        "p": p,
    }
    state, shown = outcome.state, outcome.shown
    if p < _ALPHA and lost > won:
        state, shown = State.FAIL, f"{shown}; fewer copied than by the base, p = {p:.1e}"
    return Outcome(outcome.name, outcome.group, state, shown, details)


def _copied(answers: Sequence[Answer], names: Sequence[Sequence[str]]) -> list[bool]:
    """One entry an identifier: whether it stands on the line where it belongs."""
    flags = []
    for answer, wanted in zip(answers, names, strict=True):
        lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
        flags += [i < len(lines) and lines[i] == name for i, name in enumerate(wanted)]
    return flags
