"""A layer's operations carried out in the order of a schedule, and the trace of it.

What an operation is given is what its `Op` reads, and nothing else: a buffer that a transfer fills
does not exist before the transfer's wait, so the order in `core.overlap` is the order that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sglang_ext.core.overlap import Issued, Op, Timed

Steps = Mapping[str, Callable[..., Any]]
_NEVER = float("inf")
# By transfer: the send, and the call that waits for it.
_Travelling = dict[str, tuple[Op, Callable[[], Any]]]


class Recorder:
    """The trace of one layer after another, in seconds from its making."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._layer = -1
        self._sending = -1
        self.trace: list[Timed] = []

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def begin_layer(self) -> None:
        self._layer += 1

    def begin(self, op: Op, half: int = 0, layer: int | None = None) -> int:
        """An operation starts, in `layer` or the layer begun last; its place in the trace."""
        at = self._layer if layer is None else layer
        self.trace.append(Timed(Issued(half, at, op), self.now(), _NEVER))
        self._sending = len(self.trace) - 1
        return self._sending

    def end(self, place: int) -> None:
        """What is at `place` is done; the first call counts."""
        found = self.trace[place]
        if found.end == _NEVER:
            self.trace[place] = replace(found, end=self.now())

    def sent(self) -> Callable[[], None]:
        """The operation at hand has begun a transfer; the call returned says that it is done."""
        place = self._sending
        return lambda: self.end(place)


def perform(
    order: Iterable[Op], steps: Steps, buffers: dict[str, Any], recorder: Recorder | None = None
) -> None:
    """Carry out one layer.

    Args:
        order: operations as issued.
        steps: by name of the operation, for all but waits; called with its part, where it has one,
            and with what it reads. A computation returns what it writes, a tuple for several. A
            send starts its transfer and returns a call that waits and returns what the send writes.
        buffers: what the layer starts with; what operations write is added.
        recorder: is told of every operation.

    Raises:
        KeyError: a buffer that is read before it is written.
    """
    travelling: _Travelling = {}
    if recorder is not None:
        recorder.begin_layer()
    for op in order:
        place = recorder.begin(op) if recorder is not None else 0
        if _carry_out(op, steps, buffers, travelling) and recorder is not None:
            recorder.end(place)


def perform_halves(
    schedule: Iterable[Issued],
    steps: Steps,
    halves: tuple[dict[str, Any], dict[str, Any]],
    recorder: Recorder,
) -> None:
    """Carry out the layers of both halves; as `perform`, with the buffers of either half."""
    travelling: tuple[_Travelling, _Travelling] = ({}, {})
    for item in schedule:
        place = recorder.begin(item.op, item.half, item.layer)
        if _carry_out(item.op, steps, halves[item.half], travelling[item.half]):
            recorder.end(place)


def _carry_out(op: Op, steps: Steps, buffers: dict[str, Any], travelling: _Travelling) -> bool:
    """Whether `op` is done; what a send begins is not."""
    if op.stream == "wait":
        sent, arrive = travelling.pop(op.transfer)
        _store(buffers, sent.writes, arrive())
        return True
    given = [buffers[name] for name in op.reads]
    made = steps[op.name](*given) if op.part is None else steps[op.name](op.part, *given)
    if op.stream == "send":
        # What the last layer left in them is not what this transfer brings.
        for name in op.writes:
            buffers.pop(name, None)
        travelling[op.transfer] = (op, made)
        return False
    _store(buffers, op.writes, made)
    return True


def _store(buffers: dict[str, Any], names: tuple[str, ...], made: Any) -> None:
    values = (made,) if len(names) == 1 else made
    buffers.update(zip(names, values, strict=True))
