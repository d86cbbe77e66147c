"""Two-batch and single-batch overlap as data: the order of issue, its safety, what it earns.

A schedule is a list of operations on two streams. `compute` runs on the compute stream. `send`
starts a transfer on the communication stream, after all compute issued before it. `wait` holds the
compute stream until the transfer of the same name is done. Under two-batch overlap two halves of a
batch run the same stages in turn, so that one half computes while the other half's rows travel
(DeepSeek-V3 report, section 3.2.3; stages as in SGLang 0.5.23 `operations_strategy.py`).

Times are a model: they tell what order can earn, not what a machine will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Stream = Literal["compute", "send", "wait"]


@dataclass(frozen=True)
class Op:
    """One operation of a half.

    transfer: name of the transfer that a send starts or a wait ends, else ""
    reads, writes: buffers of the half; what a send writes is there after its wait
    part: which of several alike it is, from 0; None for the only one
    """

    name: str
    stream: Stream = "compute"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    transfer: str = ""
    part: int | None = None


@dataclass(frozen=True)
class Issued:
    """An operation as issued: `half` 0 or 1, `layer` from 0."""

    half: int
    layer: int
    op: Op


@dataclass(frozen=True)
class Timed:
    """An issued operation with its time, in seconds; a wait lasts as long as it blocks."""

    issued: Issued
    start: float
    end: float


Stages = tuple[tuple[Op, ...], ...]

_ATTENTION = (
    Op("attention", reads=("hidden",), writes=("attended",)),
    Op("gate", reads=("attended",), writes=("choices",)),
)
_SEND = Op("dispatch_a", "send", ("attended", "choices"), ("arrived",), "dispatch")
_ARRIVE = Op("dispatch_b", "wait", transfer="dispatch")
_EXPERTS = Op("experts", reads=("arrived",), writes=("outputs",))
_RETURN = Op("combine_a", "send", ("outputs",), ("routed",), "combine")
_RETURNED = Op("combine_b", "wait", transfer="combine")
_SHARED = Op("shared_experts", reads=("attended",), writes=("shared",))
_OUTPUT = Op("output", reads=("routed", "shared"), writes=("hidden",))

PREFILL: Stages = (
    (*_ATTENTION, _SEND),
    (_ARRIVE, _EXPERTS, _RETURN),
    (_SHARED, _RETURNED, _OUTPUT),
)
DECODE: Stages = (
    (Op("prepare", reads=("hidden",), writes=("queries",)),),
    (Op("attention", reads=("queries",), writes=("attended",)), _ATTENTION[1]),
    (_SEND, _SHARED),
    (_ARRIVE, _EXPERTS, _RETURN),
    (_RETURNED,),
    (_OUTPUT,),
)


def without_shared(stages: Stages) -> Stages:
    """The same stages of layers that have no shared experts: what comes back is the output."""

    def alone(op: Op) -> Op:
        return replace(op, reads=("routed",)) if op.name == "output" else op

    return tuple(
        tuple(alone(op) for op in stage if op.name != "shared_experts") for stage in stages
    )


# Layers of routed experts alone, such as Qwen3-MoE's, whose decode step is SGLang's own: rows come
# back and are put out in one stage, and a turn of the other half stands before the next layer.
PREFILL_ROUTED = without_shared(PREFILL)
DECODE_ROUTED: Stages = (
    *without_shared(DECODE)[:4],
    (_RETURNED, *without_shared(DECODE)[5]),
    (),
)
# Stages that the second half runs behind the first.
BEHIND_IN_PREFILL, BEHIND_IN_DECODE = 0, 2


def exchanged(parts: int, *, shared: bool = True) -> tuple[Op, ...]:
    """From dispatch to output of one batch, under single-batch overlap.

    The shared experts run while rows travel out. The second linear of the routed ones runs in
    `parts` blocks of experts: a row goes back when the last of its experts is done, while the next
    block computes. `arrived` knows the rows' way back, `sums` collects what experts add to a row.
    Without shared experts: shared=False.
    """
    if parts < 1:
        raise ValueError(f"parts: expected at least 1, found {parts}")
    blocks: list[Op] = []
    for part in range(parts):
        reads, writes = ("arrived", "inner", "sums"), ("sums", f"outputs {part}")
        returns = f"combine {part}"
        blocks += [
            Op("down", reads=reads, writes=writes, part=part),
            Op("combine_a", "send", ("arrived", writes[1]), (f"routed {part}",), returns, part),
        ]
    whole = ("arrived", *(f"routed {part}" for part in range(parts)))
    return (
        _SEND,
        *((_SHARED,) if shared else ()),
        _ARRIVE,
        Op("gate_up", reads=("arrived",), writes=("inner", "sums")),
        *blocks,
        *(Op("combine_b", "wait", transfer=f"combine {p}", part=p) for p in range(parts)),
        Op("output", reads=(*whole, "shared") if shared else whole, writes=("hidden",)),
    )


# One batch under single-batch overlap: the way back of the last block alone is not hidden.
SINGLE: Stages = ((*_ATTENTION, *exchanged(2)),)
SEQUENTIAL: Stages = (
    (*_ATTENTION, _SEND, _ARRIVE, _EXPERTS, _RETURN, _RETURNED, _SHARED, _OUTPUT),
)


def one_batch(stages: Stages, layers: int) -> list[Issued]:
    """Stages of every layer one after another, as half 0."""
    return [Issued(0, layer, op) for layer in range(layers) for stage in stages for op in stage]


def two_batch(stages: Stages, layers: int, delta: int) -> list[Issued]:
    """Both halves in turn, a stage each; half 0 is `delta` stages ahead.

    The last stage of a layer and the first of the next are one: the attention of one half hides
    the way back of the other's rows.
    """
    turns: list[list[tuple[int, Op]]] = [[]]
    for layer in range(layers):
        first, *others = [[(layer, op) for op in stage] for stage in stages]
        turns[-1] += first
        turns += others
    if not 0 <= delta <= len(turns):
        raise ValueError(f"delta: expected 0..{len(turns)} stages, found {delta}")
    issued: list[Issued] = []
    for turn in range(len(turns) + delta):
        for half, place in ((0, turn), (1, turn - delta)):
            if 0 <= place < len(turns):
                issued += [Issued(half, layer, op) for layer, op in turns[place]]
    return issued


def hazards(schedule: Sequence[Issued], inputs: Iterable[str] = ("hidden",)) -> list[str]:
    """Reads that are too early and writes that are, in issue order; empty when the order is safe.

    Buffers belong to a layer, except `inputs`: the next layer reads what this one leaves in them.
    A buffer that a send fills may be read after the send's wait; one that a send reads may be
    written again after it. Each send is waited for once.
    """
    found: list[str] = []
    for half in sorted({i.half for i in schedule}):
        carried = frozenset(inputs)
        ready: set[str] = set(carried)
        written: set[str] = set()
        travelling: dict[str, Op] = {}
        layer = None
        for item in (i for i in schedule if i.half == half):
            if layer is not None and item.layer != layer:
                ready, written = written & carried, set()
            layer = item.layer
            op, at = item.op, f"half {half} layer {item.layer} {item.op.name}"
            if op.stream == "wait":
                sent = travelling.pop(op.transfer, None)
                if sent is None:
                    found.append(f"{at}: waits for {op.transfer!r}, which is not under way")
                else:
                    ready |= set(sent.writes)
                    written |= set(sent.writes)
                continue
            found += [f"{at}: reads {b!r} before it is ready" for b in op.reads if b not in ready]
            for name, sent in travelling.items():
                used = set(sent.reads) | set(sent.writes)
                found += [f"{at}: writes {b!r} during {name!r}" for b in op.writes if b in used]
            if op.stream == "send":
                if op.transfer in travelling:
                    found.append(f"{at}: {op.transfer!r} is under way already")
                travelling[op.transfer] = op
                ready -= set(op.writes)
            else:
                ready |= set(op.writes)
                written |= set(op.writes)
        found += [f"half {half}: {name!r} is never waited for" for name in travelling]
    return found


def exposed(schedule: Sequence[Issued]) -> list[tuple[int, int, str]]:
    """(half, layer, transfer) of transfers that no compute of the OTHER half can hide.

    Such a transfer is waited for before the other half issues any compute. The first and last
    stages of a run always leave some.
    """
    bare = []
    for start, item in enumerate(schedule):
        if item.op.stream != "send":
            continue
        hidden = False
        for later in schedule[start + 1 :]:
            if later.half != item.half:
                hidden |= later.op.stream == "compute"
            elif later.op.stream == "wait" and later.op.transfer == item.op.transfer:
                break
        if not hidden:
            bare.append((item.half, item.layer, item.op.transfer))
    return bare


def simulate(schedule: Sequence[Issued], seconds: Callable[[Issued], float]) -> list[Timed]:
    """The times of a schedule on one compute and one communication stream, both in issue order.

    seconds: duration of a compute or send operation; not asked for waits.
    """
    compute = network = 0.0
    done: dict[tuple[int, str], float] = {}
    times = []
    for item in schedule:
        key = (item.half, item.op.transfer)
        if item.op.stream == "wait":
            start, end = compute, max(compute, done.get(key, 0.0))
            compute = end
        elif item.op.stream == "send":
            start = max(network, compute)
            end = network = done[key] = start + seconds(item)
        else:
            start, end = compute, compute + seconds(item)
            compute = end
        times.append(Timed(item, start, end))
    return times


def makespan(times: Sequence[Timed]) -> float:
    """Seconds until the last operation is done."""
    return max((t.end for t in times), default=0.0)


def trace_faults(
    trace: Sequence[Timed], tolerance: float = 0.0, inputs: Iterable[str] = ("hidden",)
) -> list[str]:
    """What a recorded trace (in issue order) shows to be wrong by its times.

    Checked: everything of `hazards`, and that no wait ends before its transfer has.
    """
    found = hazards([t.issued for t in trace], inputs)
    ends: dict[tuple[int, str], float] = {}
    for t in trace:
        key = (t.issued.half, t.issued.op.transfer)
        if t.issued.op.stream == "send":
            ends[key] = t.end
        elif t.issued.op.stream == "wait" and t.end + tolerance < ends.get(key, 0.0):
            found.append(
                f"half {key[0]} layer {t.issued.layer}: {key[1]!r} was not done at its wait"
            )
    return found


def hidden_share(trace: Sequence[Timed]) -> float:
    """Share of the transfer time during which the compute stream computes; 1 without transfers."""
    busy = [(t.start, t.end) for t in trace if t.issued.op.stream == "compute"]
    sends = [(t.start, t.end) for t in trace if t.issued.op.stream == "send"]
    total = sum(end - start for start, end in sends)
    both = sum(max(0.0, min(e, end) - max(s, start)) for start, end in sends for s, e in busy)
    return both / total if total else 1.0
