"""Every legal layout of a model on a machine, predicted and ranked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from sglang_ext.launcher.catalog import POINTS, Hardware, Load
from sglang_ext.launcher.catalog import Model as Checkpoint
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.planner import refused
from sglang_ext.planner.acceptance import Curve, published
from sglang_ext.planner.cost import Model, Round
from sglang_ext.planner.draft import draft_of
from sglang_ext.planner.layout import REDUNDANT, Layout, candidates, compose_layout
from sglang_ext.planner.memory import Memory, memory_of
from sglang_ext.planner.numbers import DEFAULT, Assumptions, Basis, weakest
from sglang_ext.planner.shape import Shape, read_shape

Objective = Literal["low-latency", "balanced", "max-throughput", "long-context"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
assert POINTS == OBJECTIVES
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    ttft, tpot: limits in seconds, or None; task: whose acceptance; curve: a user's own instead
    long_context: also try context parallelism
    """

    model: Checkpoint
    hardware: Hardware
    load: Load
    objective: Objective = "balanced"
    ttft: float | None = None
    tpot: float | None = None
    task: str = "chat"
    curve: Curve | None = None
    assumptions: Assumptions = DEFAULT


@dataclass(frozen=True)
class Plan:
    """One layout with its predictions: seconds, tokens per second over all GPUs, bytes per rank.

    drafts: rows verified beside the anchor at this load; advance: tokens committed per round
    requests: under way in one attention group
    """

    layout: Layout
    memory: Memory
    cost: Model
    round: Round
    curve: Curve | None
    drafts: int
    advance: float
    ttft: float
    tpot: float
    throughput: float
    requests: int
    misses: tuple[str, ...] = ()

    @property
    def basis(self) -> Basis:
        """Of every predicted time: kernels' shares of peak are assumed."""
        return weakest("assumed", *([self.curve.basis] if self.curve else []))


@dataclass(frozen=True)
class Answer:
    """ranked: plans that fit, best first; refused: layout -> why not"""

    question: Question
    shape: Shape
    ranked: list[Plan]
    refused: dict[str, str] = field(default_factory=dict)


def search(question: Question) -> Answer:
    """Ranks all layouts; the first meets the limits.

    Raises:
        ConfigError: nothing fits, with the largest request and concurrency that do; or nothing
            meets the limits, with the nearest layout and the concurrency at which one does.
    """
    answer = _ranked(question)
    if answer.ranked[0].misses:

        def at(concurrency: int) -> Plan:
            load = replace(question.load, concurrency=concurrency)
            return _ranked(replace(question, load=load)).ranked[0]

        raise refused.limits_missed(answer, at)
    return answer


def _ranked(question: Question) -> Answer:
    shape = read_shape(question.model.config, question.model.name)
    refused.within_the_model(question, shape)
    refused.has_layouts(question.hardware)
    answer = Answer(question, shape, [])
    too_large: list[Layout] = []
    long_context = question.objective == "long-context"
    tried = candidates(question.model, question.hardware, shape.experts, long_context=long_context)
    for layout in tried:
        launch, broken = compose_layout(
            layout, question.model, question.hardware, question.load.concurrency
        )
        if launch is None:
            answer.refused[layout.name] = broken[0]
            continue
        plan = predict(question, shape, layout)
        if not plan.memory.fits:
            too_large.append(layout)
            answer.refused[layout.name] = "does not fit in memory"
            continue
        answer.ranked.append(plan)
    if not answer.ranked:
        raise refused.nothing_fits(answer, too_large)
    answer.ranked.sort(key=lambda plan: _order(question, plan))
    return answer


def predict(question: Question, shape: Shape, layout: Layout) -> Plan:
    """The predictions of one layout; its drafts per round are chosen for this load."""
    draft = draft_of(question.model, shape, layout)
    cost = Model(shape, draft, layout, question.hardware, question.assumptions)
    load = question.load
    context = load.input_tokens + load.output_tokens / 2
    requests = layout.requests_per_group(load.concurrency)
    curve = None
    if layout.algorithm:
        curve = question.curve or published(
            question.model.name, layout.algorithm, question.task, layout.gamma
        )
    drafts = best_drafts(cost, curve, requests, context)
    advance = curve.advance(drafts) if curve else 1.0
    one_round = cost.round(requests, drafts, context)
    prefill = cost.prefill(load.input_tokens)
    # A group reads prompts between rounds; each request brings one prompt and its output. Stages
    # of a pipeline read different prompts at a time.
    per_request = prefill / layout.pp + load.output_tokens * one_round.total / (advance * requests)
    busy = min(load.concurrency, layout.groups)
    throughput = busy * load.output_tokens / per_request
    plan = Plan(
        layout=layout,
        memory=memory_of(shape, draft, layout, question.hardware, load),
        cost=cost,
        round=one_round,
        curve=curve,
        drafts=drafts,
        advance=advance,
        ttft=prefill,
        tpot=load.concurrency / throughput,
        throughput=throughput,
        requests=requests,
    )
    return replace(plan, misses=_misses(question, plan))


def _misses(question: Question, plan: Plan) -> tuple[str, ...]:
    limits = (("TTFT", question.ttft, plan.ttft), ("TPOT", question.tpot, plan.tpot))
    return tuple(
        f"{name} {found * 1e3:.1f} ms > {limit * 1e3:.1f} ms"
        for name, limit, found in limits
        if limit is not None and found > limit
    )


def speed_of(question: Question, plan: Plan) -> tuple[float, str]:
    """What plans inside the limits are ranked by, the most first, and its name."""
    if question.objective == "long-context":
        alone = plan.ttft + question.load.output_tokens * plan.tpot
        return 1 / alone, "a request's speed"
    # At one concurrency it orders as TPOT does.
    return plan.throughput, "throughput"


def _order(question: Question, plan: Plan) -> tuple[float, ...]:
    """Plans inside the limits first; simpler layouts win ties."""
    return (len(plan.misses), -speed_of(question, plan)[0], len(plan.layout.parts()))


def best_drafts(cost: Model, curve: Curve | None, requests: int, context: float) -> int:
    """The verify budget: drafts per request with the most tokens per second, 0 when none pays."""
    if curve is None:
        return 0

    def speed(drafts: int) -> float:
        return curve.advance(drafts) / cost.round(requests, drafts, context).total

    return max(range(cost.layout.gamma + 1), key=lambda drafts: (speed(drafts), -drafts))


def budgets(plan: Plan, context: float) -> dict[int, int]:
    """Batch per attention group -> verify budget."""
    return {b: best_drafts(plan.cost, plan.curve, b, context) for b in BATCHES}


def drafting_loses_beyond(plan: Plan, context: float, most: int = 4096) -> int | None:
    """The largest batch per group at which any draft pays; None when it pays up to `most`."""
    if plan.curve is None:
        return None
    if best_drafts(plan.cost, plan.curve, 1, context) == 0:
        return 0
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if best_drafts(plan.cost, plan.curve, middle, context):
            low = middle
        else:
            high = middle
    return low if low < most else None


def overlap_pays_from(plan: Plan, context: float, most: int = 1024) -> int | None:
    """The smallest batch per group at which two-batch overlap is faster; None when at none."""
    return next((b for b in range(2, most + 1) if _overlap_gains(plan, b, context)), None)


def _overlap_gains(plan: Plan, requests: int, context: float) -> bool:
    together = plan.cost.round(requests, plan.drafts, context, tbo=True).total
    return together < plan.cost.round(requests, plan.drafts, context, tbo=False).total


def balancing_pays_from(plan: Plan, context: float, most: float = 8.0) -> float | None:
    """The least imbalance (busiest expert rank over the mean) at which EPLB is faster, if any."""
    if plan.layout.a2a != "deepep" or plan.layout.redundant:
        return None

    def gains(imbalance: float) -> bool:
        given = replace(plan.cost.assumptions, imbalance=imbalance)
        without = replace(plan.cost, assumptions=given)
        with_it = replace(without, layout=replace(plan.layout, redundant=REDUNDANT))
        requests = plan.requests
        return (
            with_it.round(requests, plan.drafts, context).total
            < without.round(requests, plan.drafts, context).total
        )

    if not gains(most):
        return None
    low, high = 1.0, most
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def concurrency_for(question: Question, rate: float) -> int:
    """The fewest requests at a time that finish `rate` requests per second within the limits.

    Raises:
        ConfigError: no layout keeps up, with the highest rate; or not even one request at a time
            fits or meets the limits.
    """

    def at(concurrency: int) -> Plan:
        asked = replace(question, load=replace(question.load, concurrency=concurrency))
        return search(asked).ranked[0]

    def reached(concurrency: int) -> float:
        return at(concurrency).throughput / question.load.output_tokens

    # `low` at a time are too slow; `high` are fast enough, or too many.
    low, high, best = 0, 1, reached(1)
    is_reached = best >= rate
    while not is_reached:
        low, high = high, 2 * high
        try:
            found = reached(high)
        except ConfigError:
            break
        best, is_reached = max(best, found), found >= rate
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found = reached(middle)
        except ConfigError:
            high = middle
            continue
        best = max(best, found)
        if found >= rate:
            high, is_reached = middle, True
        else:
            low = middle
    if is_reached:
        return high
    raise ConfigError(
        question.model.name,
        "--rate",
        expected=f"at most {best:.2f} requests per second ({at(1).basis})",
        found=rate,
        remedy="Use more GPUs, or a lower rate.",
    )
