"""The whole run: which checks, in which order, and what may be said at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from sglang_ext.lossless.echo import echo_check, echo_prompts
from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.errors import CannotTest, RefusedRequest
from sglang_ext.lossless.flow import Opened, Report, Running, Side, drive
from sglang_ext.lossless.greedy import Reference, greedy_check, measure_reference, repeated_check
from sglang_ext.lossless.parameters import CASES, logprob_check, parameter_check, seed_check
from sglang_ext.lossless.prompts import as_text
from sglang_ext.lossless.sampled import SampledPlan, sampled_check
from sglang_ext.lossless.types import Drafts, Facts, Outcome, Prompt, Sampling, State

GROUPS = ("greedy", "sampled", "echo", "parameters")


@dataclass(frozen=True)
class Plan:
    """What to check.

    tokens: of each greedy answer; noise_prompts: asked again to measure the base against itself
    bound: nats, None to derive it; dtype: "auto" to ask the server
    """

    groups: tuple[str, ...] = GROUPS
    tokens: int = 64
    concurrency: tuple[int, ...] = (1, 4, 16)
    bound: float | None = None
    dtype: str = "auto"
    noise_prompts: int = 24
    sampled: SampledPlan = field(default_factory=SampledPlan)
    sampled_prompts: int = 6
    parameter_prompts: int = 6
    echo_prompts: int = 12
    echo_each: int = 8
    repeats: int = 24
    seed: int = 1


@dataclass(frozen=True)
class Result:
    """All outcomes, and between which servers."""

    base: Facts
    spec: Facts
    outcomes: tuple[Outcome, ...]
    drafts: Drafts | None
    notes: tuple[str, ...]
    seconds: float

    def count(self, state: State) -> int:
        return sum(outcome.state is state for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """0 lossless within what was tested, 1 unexplained difference, 2 could not test."""
        if self.count(State.FAIL):
            return 1
        shown = any(o.state is State.PASS and o.group in GROUPS for o in self.outcomes)
        return 2 if self.count(State.UNDECIDED) or not shown else 0


# Sampled settings beside plain temperature 1: (name, changes). Two prompts each.
SETTINGS: tuple[tuple[str, dict[str, object]], ...] = (
    ("temperature 0.7, top-p 0.9", {"temperature": 0.7, "top_p": 0.9}),
    ("top-k 5", {"top_k": 5}),
    ("min-p 0.1", {"min_p": 0.1}),
    ("frequency penalty", {"frequency_penalty": 1.0}),
)


def run(
    opened: Opened,
    prompts: Sequence[Prompt],
    plan: Plan,
    report: Report = lambda side, name: None,
    progress: Callable[[int], Callable[[], None]] = lambda total: lambda: None,
) -> Result:
    """Run every check of the plan. Raises CannotTest where nothing can be asked at all."""
    started = time.monotonic()
    notes: list[str] = []
    with opened(Side.BASE) as base:
        base_facts = base.facts
        asked = _usable(base, prompts, plan, notes)
        again = min(plan.noise_prompts, len(asked))
        report(Side.BASE, "base against itself")
        reference = measure_reference(
            base,
            asked,
            Sampling(plan.tokens),
            concurrency=max(plan.concurrency),
            dtype=base_facts.dtype if plan.dtype == "auto" else plan.dtype,
            bound=plan.bound,
            again=again,
            tick=progress(len(asked) + 2 * again),
        )
        if plan.dtype == "auto" and base_facts.dtype == "unknown":
            notes.append("the dtype is unknown; the limits of bfloat16 were used (see --dtype)")
    outcomes = [reference.outcome]
    counted = _Counted(opened)
    if reference.outcome.state is State.PASS:
        outcomes += drive(_checks(asked, plan, reference), counted, report)
    spec_facts = counted.facts.get(Side.SPEC)
    if spec_facts is None:
        with opened(Side.SPEC) as spec:
            spec_facts = spec.facts
    if base_facts.model != spec_facts.model:
        notes.append(f"the servers name different models: {base_facts.model}, {spec_facts.model}")
    outcomes += counted.coverage()
    seconds = time.monotonic() - started
    spec_drafts = counted.drafts[Side.SPEC]
    return Result(base_facts, spec_facts, tuple(outcomes), spec_drafts, tuple(notes), seconds)


def _checks(asked: Sequence[Prompt], plan: Plan, reference: Reference) -> list[Running]:
    plain = Sampling(plan.tokens)
    # A spread over the kinds of prompt rather than the first few.
    some = _spread(asked, plan.parameter_prompts)
    found: list[Running] = []
    if "greedy" in plan.groups:
        for n in plan.concurrency:
            flow = greedy_check(asked, plain, reference, n)
            found.append(Running(f"greedy, {n} at a time", "greedy", flow))
        if plan.repeats:
            flow = repeated_check(some[-1], plain, reference, plan.repeats, 12)
            found.append(Running("greedy, one prompt many times", "greedy", flow))
    if "sampled" in plan.groups:
        found += _sampled(asked, plan)
    if "echo" in plan.groups:
        lists = echo_prompts(plan.echo_prompts, plan.echo_each, plan.seed)
        tokens = max(plan.tokens, 40 * plan.echo_each)
        flow = echo_check(lists, tokens, max(plan.concurrency), reference.bound)
        found.append(Running("identifier echo", "echo", flow))
    if "parameters" in plan.groups:
        for case in CASES:
            flow = parameter_check(case, some, plain, reference)
            found.append(Running(case.name, "parameters", flow))
        found.append(Running("seed", "parameters", seed_check(some[:3], plan.tokens)))
        flow = logprob_check(some, plain, reference)
        found.append(Running("log-probabilities", "parameters", flow))
    return found


def _sampled(asked: Sequence[Prompt], plan: Plan) -> list[Running]:
    prompts = _spread(asked, plan.sampled_prompts)
    # Tokens beyond those compared, so that every compared one can come from a draft.
    plain = Sampling(plan.sampled.depth + 2, temperature=1.0, ignore_eos=True)
    name = "sampled, temperature 1"
    found = [Running(name, "sampled", sampled_check(name, prompts, plain, plan.sampled))]
    for label, changes in SETTINGS:
        name = f"sampled, {label}"
        sampling = replace(plain, **changes)  # type: ignore[arg-type]
        flow = sampled_check(name, prompts[:2], sampling, plan.sampled)
        found.append(Running(name, "sampled", flow))
    return found


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts at even distances."""
    count = max(1, min(count, len(prompts)))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _usable(
    base: Endpoint, prompts: Sequence[Prompt], plan: Plan, notes: list[str]
) -> list[Prompt]:
    """Prompts that fit the context and that the server takes, as ids where it tells them."""
    taken = [(prompt, _taken(base, prompt, plan.tokens)) for prompt in prompts]
    kept = [found for _, found in taken if found is not None]
    left_out = [prompt.name for prompt, found in taken if found is None]
    if left_out:
        notes.append(
            f"{len(left_out)} prompts left out, refused or too long for the server: "
            + ", ".join(left_out)
        )
    if not kept:
        raise CannotTest(
            base.facts.url,
            expected="to take one of the prompts",
            found="all refused",
            remedy="Give shorter --prompts, or fewer --tokens.",
        )
    return kept


def _taken(base: Endpoint, prompt: Prompt, tokens: int) -> Prompt | None:
    """The prompt as the server takes it; a chat it has no template for is asked in plain text."""
    try:
        found = base.resolved(prompt)
        if found.ids is None:
            base.ask(found, Sampling(1))
    except RefusedRequest:
        return None if prompt.messages is None else _taken(base, as_text(prompt), tokens)
    if found.ids is not None and base.facts.context is not None:
        return found if len(found.ids) + tokens + 1 <= base.facts.context else None
    return found


class _Counted:
    """Passes endpoints through and keeps what they say about themselves and their drafts."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.drafts: dict[Side, Drafts | None] = {Side.BASE: None, Side.SPEC: None}
        self.facts: dict[Side, Facts] = {}

    @contextmanager
    def __call__(self, side: Side) -> Iterator[Endpoint]:
        with self._opened(side) as endpoint:
            self.facts[side], before = endpoint.facts, endpoint.drafts or Drafts()
            yield endpoint
            if (now := endpoint.drafts) is not None:
                grown = Drafts(now.rounds - before.rounds, now.accepted - before.accepted)
                self.drafts[side] = (self.drafts[side] or Drafts()) + grown

    def coverage(self) -> list[Outcome]:
        """Whether the one side drafted and the other did not, where the servers tell."""
        base, spec = self.drafts[Side.BASE], self.drafts[Side.SPEC]
        if base is not None and base.accepted:
            shown = f"the base accepted {base.accepted} drafts: it speculates itself"
            return [Outcome("coverage", "coverage", State.UNDECIDED, shown)]
        if spec is None:
            return []
        shown = f"{spec.accepted} drafts accepted in {spec.rounds} verifications"
        if not spec.accepted:
            shown += ": speculation was not exercised"
            return [Outcome("coverage", "coverage", State.UNDECIDED, shown)]
        return [Outcome("coverage", "coverage", State.PASS, shown)]
