"""What expert exchanges have moved, as Prometheus metrics: real rows, no padding, all layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from prometheus_client import Counter
from sglang.srt.runtime_context import get_observability

from sglang_ext.srt.parallel.deep_ep_buffer import Buffer
from sglang_ext.srt.parallel.row_exchange import Traffic


class TrafficMeter:
    """Adds what one buffer has moved since the last reading to the counters of this process."""

    def __init__(self, buffer: Buffer) -> None:
        self.traffic = buffer.traffic
        self._seen = {call: Traffic() for call in buffer.traffic}
        self._rows, self._bytes = _counters()

    def read(self) -> None:
        for call, now in self.traffic.items():
            before = self._seen[call]
            if now.calls == before.calls:
                continue
            self._rows.labels(call).inc(now.rows - before.rows)
            self._bytes.labels(call, "peers").inc(now.bytes_to_peers - before.bytes_to_peers)
            self._bytes.labels(call, "itself").inc(now.bytes_kept - before.bytes_kept)
            self._seen[call] = replace(now)


@cache
def meter(buffer: Buffer) -> TrafficMeter | None:
    """The one meter of a buffer; None where the server exports no metrics."""
    return TrafficMeter(buffer) if get_observability().enable_metrics else None


@cache
def _counters() -> tuple[Counter, Counter]:
    rows = Counter(
        "sglang_ext_expert_exchange_rows",
        "Copies of a row sent to the ranks of its experts, or back, by kind of call.",
        ["call"],
    )
    moved = Counter(
        "sglang_ext_expert_exchange_bytes",
        "Bytes of those copies, by kind of call and whether they left their rank.",
        ["call", "to"],
    )
    return rows, moved
