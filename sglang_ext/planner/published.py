"""Four published tables, computed again: MTP gain, break-even, DSA against dense, the scheduler.

They pin the planner's formulas: `layer_time` is the function that plans use, here with the
constants of the published examples (an H100 that holds three experts of a 61-layer MoE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.planner.roofline import LayerTime, LayerWork, Rates, layer_time

H100 = Rates(hbm=3.35e12, attention=989e12, experts=1979e12, net=50e9)
LAYERS = 61
ATTENTION_WEIGHTS, EXPERT_WEIGHTS, LOCAL_EXPERTS = 187e6, 44e6, 3
EXPERT_FLOP, EXPERTS_COMPUTED, EXPERTS_SENT = 88e6, 9, 8
TOKEN_BYTES = 7168 + 224 + 2 * 7168  # fp8 dispatch, scales, bf16 combine
KV_BYTES, PAIR_FLOP = 1152, 278528
INDEXER_BYTES, INDEXER_FLOP, SELECTED = 132, 16384, 2048
ACCEPTANCE = (0.85, 0.75, 0.65)
POINTS = ((4096, 16), (4096, 64), (16384, 16), (16384, 64))


def decode_layer(sequences: int, tokens: int, context: int) -> LayerTime:
    """One layer of a step of `sequences` requests with `tokens` query rows in all."""
    work = LayerWork(
        attention_bytes=ATTENTION_WEIGHTS + sequences * context * KV_BYTES,
        attention_flop=tokens * context * PAIR_FLOP,
        expert_bytes=LOCAL_EXPERTS * EXPERT_WEIGHTS,
        expert_flop=tokens * EXPERTS_COMPUTED * EXPERT_FLOP,
        sent_bytes=tokens * EXPERTS_SENT * TOKEN_BYTES,
    )
    return layer_time(work, H100)


def mtp_step(requests: int, context: int, drafts: int) -> float:
    """Seconds of a round: the target over 1 + drafts rows, and one MTP layer per draft."""
    verify = decode_layer(requests, requests * (drafts + 1), context).overlapped
    draft = decode_layer(requests, requests, context).overlapped
    return LAYERS * verify + drafts * draft


def advance(conditional: Sequence[float], drafts: int) -> float:
    """Tokens committed per round: 1 + p1 + p1 p2 + ..."""
    total, survival = 1.0, 1.0
    for p in conditional[:drafts]:
        survival *= p
        total += survival
    return total


@dataclass(frozen=True)
class MtpRow:
    """tokens per second and GPU without drafts, and the gain with 1, 2, 3 of them."""

    context: int
    requests: int
    base: float
    gains: tuple[float, ...]


def mtp_table() -> list[MtpRow]:
    """Throughput with k drafts over throughput without."""
    rows = []
    for context, requests in POINTS:
        base = requests / mtp_step(requests, context, 0)
        speeds = [
            requests * advance(ACCEPTANCE, k) / mtp_step(requests, context, k) for k in (1, 2, 3)
        ]
        rows.append(MtpRow(context, requests, base, tuple(s / base for s in speeds)))
    return rows


@dataclass(frozen=True)
class BreakEvenRow:
    """ratio: step time with k drafts over without; needed: accepted drafts per round to gain."""

    context: int
    requests: int
    drafts: int
    base_ms: float
    step_ms: float

    @property
    def ratio(self) -> float:
        return self.step_ms / self.base_ms

    @property
    def needed(self) -> float:
        return self.ratio - 1

    @property
    def possible(self) -> bool:
        """Whether drafting gains when every draft is accepted."""
        return self.needed < self.drafts


def break_even_table() -> list[BreakEvenRow]:
    """Drafting pays when 1 + p1 + p1 p2 + ... exceeds the ratio of step times."""
    return [
        BreakEvenRow(
            context,
            requests,
            k,
            1e3 * mtp_step(requests, context, 0),
            1e3 * mtp_step(requests, context, k),
        )
        for context, requests in POINTS
        for k in (1, 2, 3)
    ]


@dataclass(frozen=True)
class DsaRow:
    """Per layer, dense then DSA: decode GFLOP and MiB per token, prefill TFLOP."""

    context: int
    decode_gflop: tuple[float, float]
    decode_mib: tuple[float, float]
    prefill_tflop: tuple[float, float]


def dsa_table() -> list[DsaRow]:
    """Sparse selection of 2048 keys by the lightning indexer against attention to all keys.

    Decode counts the absorbed form; a dense prefill the cheaper decompressed one (2 x 128 heads x
    (192 + 128) per pair), a sparse one the absorbed form over the selected keys, each query charged
    for all 2048.
    """
    rows = []
    for thousands in (4, 32, 128):
        n = thousands * 1024
        kept = min(n, SELECTED)
        pairs = n * n / 2
        dense = pairs * 2 * 128 * (192 + 128)
        sparse = n * kept * PAIR_FLOP + pairs * INDEXER_FLOP
        rows.append(
            DsaRow(
                n,
                (n * PAIR_FLOP / 1e9, (kept * PAIR_FLOP + n * INDEXER_FLOP) / 1e9),
                (n * KV_BYTES / 2**20, (kept * KV_BYTES + n * INDEXER_BYTES) / 2**20),
                (dense / 1e12, sparse / 1e12),
            )
        )
    return rows


@dataclass(frozen=True)
class ScheduleRow:
    """One candidate of Algorithm 1 for one request.

    rows: verified in all; expected: tokens committed; speed: steps per second at that many rows
    """

    drafts: int
    survival: float
    rows: int
    expected: float
    speed: float
    decision: str

    @property
    def tokens_per_second(self) -> float:
        return self.expected * self.speed


CONFIDENCE = (0.95, 0.92, 0.85, 0.30)
SPEEDS = (1000.0, 520.0, 400.0, 340.0, 280.0)


def schedule_table(
    confidence: Sequence[float] = CONFIDENCE, speeds: Sequence[float] = SPEEDS
) -> list[ScheduleRow]:
    """DSpark's Algorithm 1 for R = 1: admit while expected tokens per second rise, then stop."""
    rows = [ScheduleRow(0, 1.0, 1, 1.0, speeds[0], "start")]
    survival, expected = 1.0, 1.0
    for drafts, c in enumerate(confidence, 1):
        survival *= c
        expected += survival
        row = ScheduleRow(drafts, survival, drafts + 1, expected, speeds[drafts], "admit")
        if row.tokens_per_second <= rows[-1].tokens_per_second:
            rows.append(ScheduleRow(*_fields(row), decision="reject, stop"))
            break
        rows.append(row)
    return rows


def _fields(row: ScheduleRow) -> tuple[int, float, int, float, float]:
    return row.drafts, row.survival, row.rows, row.expected, row.speed
