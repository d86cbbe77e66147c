"""Why a question has no answer, and the nearest one that has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_ext.launcher.catalog import Hardware
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.planner.draft import draft_of
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.memory import GB, Largest, largest, largest_that_fits, memory_of
from sglang_ext.planner.shape import Shape

if TYPE_CHECKING:
    from sglang_ext.planner.search import Answer, Plan, Question

MOST_RANKS = 256  # tp32 in each of pp8's stages, the largest of `launch/parts`


def within_the_model(question: Question, shape: Shape) -> None:
    """Raises ConfigError for a request that is longer than the model's context."""
    length = question.load.input_tokens + question.load.output_tokens
    if length > shape.longest:
        raise ConfigError(
            question.model.name,
            "--input-tokens + --output-tokens",
            expected=f"at most the model's {shape.longest} positions",
            found=length,
            remedy="Shorten the request.",
        )


def has_layouts(hardware: Hardware) -> None:
    """Raises ConfigError where no parts make a layout: they are powers of two."""
    gpus, gpu = hardware.gpus, hardware.gpu.name
    if gpus & (gpus - 1) == 0 and gpus <= MOST_RANKS:
        return
    less = min(1 << (gpus.bit_length() - 1), MOST_RANKS)
    nearest = [n for n in (less, 2 * less) if n <= MOST_RANKS]
    names = [f"{n // 8}x8x{gpu}" if hardware.nodes > 1 and n > 8 else f"{n}x{gpu}" for n in nearest]
    raise ConfigError(
        "plan",
        "--hardware",
        expected=f"1, 2, 4, ... {MOST_RANKS} GPUs in all, a power of two",
        found=hardware.name,
        remedy=f"Plan for {' or '.join(names)}; a preset of your own may have other sizes.",
    )


def limits_missed(answer: Answer, at: Callable[[int], Plan]) -> ConfigError:
    """Names the layout that comes nearest, and the most requests at a time that meet the limits.

    at: concurrency -> the best plan for so many requests at a time
    """
    question = answer.question
    limits = {"ttft": question.ttft, "tpot": question.tpot}
    given = {name: limit for name, limit in limits.items() if limit is not None}

    def excess(plan: Plan) -> float:
        return max(getattr(plan, name) / limit for name, limit in given.items())

    def times(plan: Plan) -> str:
        shown = (f"{name.upper()} {getattr(plan, name) * 1e3:.3g} ms" for name in given)
        return f"`{plan.layout.name}` with {', '.join(shown)} ({plan.basis})"

    nearest = min(answer.ranked, key=excess)
    instead = "Not even one request at a time meets them."
    if most := largest(lambda n: not at(n).misses, question.load.concurrency - 1):
        instead = f"At {most} requests at a time {times(at(most))} meets them."
    asked = ", ".join(f"{name.upper()} {limit * 1e3:.3g} ms" for name, limit in given.items())
    many = question.load.concurrency
    return ConfigError(
        question.model.name,
        ", ".join(f"--{name}" for name in given),
        expected=f"limits that a layout on {question.hardware.name} meets, {many} at a time",
        found=asked,
        remedy=f"Nearest: {times(nearest)}. {instead}",
    )


class DoesNotFit(ConfigError):
    """No layout holds the load.

    most: requests of its length at a time that a layout holds, one without pipeline stages if any
    tokens: the longest request that fits at its concurrency; both 0 where no request fits
    """

    def __init__(
        self, question: Question, found: str, remedy: str, *, most: int, tokens: int
    ) -> None:
        super().__init__(
            question.model.name,
            "memory",
            expected=f"a load that fits {question.hardware.name}",
            found=found,
            remedy=remedy,
        )
        self.most, self.tokens = most, tokens


def nothing_fits(answer: Answer, too_large: Iterable[Layout]) -> DoesNotFit:
    """Names the longest request and the most requests that fit, else what keeps them all out."""
    question, shape = answer.question, answer.shape

    def room(layout: Layout) -> Largest:
        draft = draft_of(question.model, shape, layout)
        return largest_that_fits(shape, draft, layout, question.hardware, question.load)

    found = [(layout, room(layout)) for layout in too_large]
    best_tokens = max((fits.tokens for _, fits in found), default=0)
    best_concurrency = max((fits.concurrency for _, fits in found), default=0)
    load = question.load
    asked = f"{load.concurrency} requests of {load.input_tokens + load.output_tokens} tokens"
    if not best_tokens and not best_concurrency:
        remedy = f"No request fits: {_why_nothing(answer, too_large)}"
    else:
        length = f"requests of up to {best_tokens} tokens fit"
        if not best_tokens:
            length = f"not even prompts of one token fit beside {load.output_tokens} of output"
        many = f"{best_concurrency} requests at a time fit"
        if best_concurrency < 2:
            many = "one request at a time fits" if best_concurrency else "not even one fits"
        remedy = f"At this concurrency {length}; of this length {many} (derived)."
    flat = max((fits.concurrency for layout, fits in found if layout.pp == 1), default=0)
    most = flat or best_concurrency
    return DoesNotFit(question, asked, remedy, most=most, tokens=best_tokens)


def _why_nothing(answer: Answer, too_large: Iterable[Layout]) -> str:
    """The smallest share of weights among what is too large, else the commonest refusal."""
    question, shape = answer.question, answer.shape
    load = replace(question.load, concurrency=1)
    held = [
        memory_of(shape, draft_of(question.model, shape, a), a, question.hardware, load)
        for a in too_large
    ]
    if held:
        least = min(held, key=lambda m: m.total)
        cpu = question.hardware.gpu.is_cpu
        more = "Use more or larger GPUs."
        if cpu:
            more = "Use a machine with more memory: `cpu` is that of launch/gpus/cpu.yaml."
        weights, reserve = sum(least.weights.values()), sum(least.reserve.values())
        return (
            f"weights take {weights / GB:.0f} GiB per rank and the runtime {reserve / GB:.0f}, of "
            f"{least.capacity / GB:.0f} GiB (derived). {more}"
        )
    reasons = list(answer.refused.values())
    return max(set(reasons), key=reasons.count)
