"""What `sglang-ext doctor` found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One line of the report. state: ok, note (worth knowing) or fail (a server cannot start)."""

    name: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, every change made to SGLang, who serves what, and which kernels run."""

    checks: list[Check]
    ledger: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, str]] = field(default_factory=list)
    kernels: list[dict[str, str]] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.state != "fail" for check in self.checks)

    def as_json(self) -> str:
        return json.dumps({"healthy": self.healthy, **asdict(self)}, indent=1)

    def as_text(self) -> str:
        """The checks, then who answers for what, the kernels, and one line per patch."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{c.state:4}  {c.name:{width}}  {c.found}" for c in self.checks]
        lines += [f"      {c.name:{width}}  -> {c.remedy}" for c in self.checks if c.remedy]
        lines += ["", "whose code answers here:"]
        lines += [
            f"{row['who']:10} {row['kind']:10} {row['name']}"
            + (f" ({row['why']})" if row["why"] else "")
            for row in self.answers
        ]
        lines += ["", "kernels:"]
        lines += [f"{row['runs']:10} {row['name']:20} of {row['has']}" for row in self.kernels]
        lines += ["", "patches (each names what it changes and when it can go):"]
        lines += [f"{row['state']:12} {row['name']:28} {row['target']}" for row in self.ledger]
        return "\n".join(lines)


def guarded(name: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """The checks of `look`; one that itself fails is a failed check, never a silent gap."""
    try:
        return list(look())
    except Exception as error:
        return [Check(name, "fail", f"{type(error).__name__}: {error}", "Could not be examined.")]
    except SystemExit as stop:
        lines = str(stop.code).splitlines() or [""]
        return [Check(name, "fail", lines[0], lines[-1])]
