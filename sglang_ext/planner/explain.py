"""Why one layout leads: its largest terms, the two nearest losers, what would separate them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.planner.search import Answer, Plan, speed_of


@dataclass(frozen=True)
class Rival:
    """A losing layout.

    behind: share of what plans are ranked by (`of`) that it lacks; with `misses`, the limits that
    it exceeds, it loses by those and may be ahead otherwise
    part: the term that differs most; measurement: what would settle it
    """

    name: str
    behind: float
    of: str
    misses: tuple[str, ...]
    part: str
    measurement: str


def top_terms(plan: Plan, count: int = 3) -> list[tuple[str, float]]:
    """The largest parts of a round, seconds."""
    return list(plan.round.terms().items())[:count]


def rivals(answer: Answer, count: int = 2) -> list[Rival]:
    """The nearest layouts behind the best one, predictions that are equal counted as one."""
    best, found = answer.ranked[0], list[Rival]()
    seen = {(best.round, best.layout.replicas)}
    for plan in answer.ranked[1:]:
        if (plan.round, plan.layout.replicas) in seen:
            continue
        seen.add((plan.round, plan.layout.replicas))
        found.append(_compare(best, plan, answer))
        if len(found) == count:
            break
    return found


def ties(answer: Answer) -> list[str]:
    """Layouts that the model cannot tell from the best."""
    best = answer.ranked[0]
    return [
        p.layout.name
        for p in answer.ranked[1:]
        if p.round == best.round and p.layout.replicas == best.layout.replicas
    ]


def _compare(best: Plan, plan: Plan, answer: Answer) -> Rival:
    mine, theirs = best.round.terms(), plan.round.terms()
    part = max(mine, key=lambda name: abs(mine[name] - theirs[name]))
    load = answer.question.load
    (most, of), (less, _) = speed_of(answer.question, best), speed_of(answer.question, plan)
    b = best.layout.requests_per_group(load.concurrency)
    c = plan.layout.requests_per_group(load.concurrency)
    return Rival(
        name=plan.layout.name,
        behind=1 - less / most,
        of=of,
        misses=plan.misses,
        part=part,
        measurement=(
            f"time of {part} per round: predicted {mine[part] * 1e3:.2f} ms in "
            f"`{best.layout.name}` ({b} requests per group, {best.drafts} drafts) and "
            f"{theirs[part] * 1e3:.2f} ms in `{plan.layout.name}` ({c}, {plan.drafts})"
        ),
    )
