"""A check as a generator that asks for the server it needs next.

Servers that do not fit in memory together can then take turns: everything that waits for one side
is advanced before the other is started.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum

from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.errors import CannotTest, RefusedRequest
from sglang_ext.lossless.types import Outcome, State


class Side(StrEnum):
    BASE = "base"
    SPEC = "spec"


# Yields the side it needs, is sent that side's endpoint, returns its outcome.
Flow = Generator[Side, Endpoint, Outcome]
Opened = Callable[[Side], AbstractContextManager[Endpoint]]
Report = Callable[[str, str], None]


class Running:
    """One check under way."""

    def __init__(self, name: str, group: str, flow: Flow) -> None:
        self.name, self.group, self.flow = name, group, flow
        self.outcome: Outcome | None = None
        self.wants: Side | None = None
        self._advance(None)

    def serve(self, endpoint: Endpoint) -> None:
        self._advance(endpoint)

    def _advance(self, endpoint: Endpoint | None) -> None:
        try:
            self.wants = next(self.flow) if endpoint is None else self.flow.send(endpoint)
        except StopIteration as end:
            self.outcome, self.wants = end.value, None
        except RefusedRequest as refusal:
            self._ended(State.UNDECIDED, f"{self.wants} server: {refusal}")
        except CannotTest as error:
            self._ended(State.UNDECIDED, str(error))

    def _ended(self, state: State, shown: str) -> None:
        self.outcome, self.wants = Outcome(self.name, self.group, state, shown), None


def drive(checks: Sequence[Running], opened: Opened, report: Report) -> list[Outcome]:
    """Run all checks to their end. opened(side): the endpoint, up while the context lasts."""
    side = Side.BASE
    while any(check.wants for check in checks):
        if not any(check.wants is side for check in checks):
            side = _other(side)
        with opened(side) as endpoint:
            # A check may want the same side again; it gets it before the servers change over.
            while waiting := [check for check in checks if check.wants is side]:
                for check in waiting:
                    report(side, check.name)
                    check.serve(endpoint)
        side = _other(side)
    return [check.outcome for check in checks if check.outcome is not None]


def _other(side: Side) -> Side:
    return Side.SPEC if side is Side.BASE else Side.BASE
