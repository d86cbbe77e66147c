"""How many drafted tokens the target accepts: curves by position, from tables or a user's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_ext.launcher import catalog
from sglang_ext.launcher.errors import ConfigError, nearest
from sglang_ext.launcher.fields import Fields, load_mapping
from sglang_ext.planner.numbers import Basis

KINDS = {
    "math": ("gsm8k", "math", "aime25"),
    "code": ("mbpp", "humaneval", "lcb"),
    "chat": ("mt-bench", "alpaca", "arena"),
}
# Which published target stands in for one that has no table of its own.
_STAND_IN = "qwen3-14b"


@dataclass(frozen=True)
class Curve:
    """conditional: probability that draft k is accepted once all before it were, by position.

    basis: `measured` (per position, a user's own), `derived` (a constant rate that gives a
    published accepted length), `assumed` (another model's)
    """

    conditional: tuple[float, ...]
    basis: Basis
    source: str

    def advance(self, drafts: int) -> float:
        """Tokens committed per round when `drafts` rows are verified, bonus included."""
        total, survival = 1.0, 1.0
        for p in self.conditional[:drafts]:
            survival *= p
            total += survival
        return total


def constant_rate(tau: float, gamma: int) -> float:
    """The rate a with 1 + a + ... + a^gamma = tau, by bisection; tau in [1, gamma + 1]."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**k for k in range(gamma + 1)) < tau:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def published(model: str, algorithm: str, task: str, gamma: int) -> Curve:
    """The curve of a task (`gsm8k`) or a kind of task (`math`, `code`, `chat`).

    A model without a table of its own gets that of Qwen3-14B, marked as assumed.

    Raises:
        ConfigError: an unknown task.
    """
    own = "demo" if model == "demo" else "published"
    path = catalog.ROOT / "acceptance" / f"{own}.yaml"
    f = Fields(load_mapping(path), str(path), ("source", "gamma", "tau"))
    tables = f.mapping("tau")
    known = model in tables
    every: dict[str, dict[str, float]] = tables[model if known else _STAND_IN]
    allowed = [*KINDS, *dict.fromkeys(name for table in every.values() for name in table)]
    if task not in allowed:
        raise ConfigError(
            "plan",
            "--task",
            expected=f"one of {', '.join(allowed)}",
            found=task,
            remedy=nearest(task, allowed) or "Choose one of them.",
        )
    table, members = every[algorithm], KINDS.get(task, (task,))
    if own == "demo":
        # Its prompts are of other sets than the kinds' and one draft was not evaluated by set.
        task = task if task in table else "all"
        members = (task,)
    tau = sum(table[name] for name in members) / len(members)
    rate = constant_rate(tau, f.whole("gamma", at_least=1))
    source = f"{f.text('source')}: tau {tau:.2f} of {'' if known else _STAND_IN + ', '}{task}"
    return Curve((rate,) * gamma, "derived" if known else "assumed", source)


def from_file(path: Path, task: str | None) -> Curve:
    """A user's own curve: `conditional`, a list of rates by position, or one list per kind of task.

    task: the kind that is asked for, None where none was

    Raises:
        ConfigError: a field is missing, unknown, or no probability; a kind that the file has not,
            or any of a file with one curve.
    """
    f = Fields(load_mapping(path), str(path), ("conditional", "source"))
    source = f.text("source", str(path))
    if not isinstance(f.raw.get("conditional"), dict):
        if task is not None:
            raise _no_task(f"none, since {path} holds one curve for all", task, "Leave it out.")
        return Curve(conditional(f), "measured", source)
    kinds = Fields(f.raw["conditional"], f"{path}, conditional", None)
    known = [str(kind) for kind in kinds.raw]
    if task not in known:
        hint = nearest(task or "", known) or "Choose one of them."
        raise _no_task(f"one of {', '.join(known) or 'the kinds that it should hold'}", task, hint)
    return Curve(conditional(kinds, str(task)), "measured", f"{source}, {task}")


def _no_task(expected: str, found: str | None, remedy: str) -> ConfigError:
    return ConfigError("plan", "--task", expected=expected, found=found or "nothing", remedy=remedy)


def conditional(f: Fields, name: str = "conditional") -> tuple[float, ...]:
    """The field of that name. Raises ConfigError where it holds no probabilities."""
    rates = f.numbers(name)
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise f.error(name, "probabilities, one per drafted position", list(rates))
    return rates
