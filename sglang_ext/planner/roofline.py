"""Time of one layer from what it reads, computes and sends; shared by plans and published tables.

attention = max(bytes / HBM, FLOP / bf16)        experts = max(bytes / HBM, FLOP / expert rate)
layer     = max(attention + experts, communication)   when the two overlap perfectly
          = attention + experts + communication       when they do not
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Per second: hbm and net in bytes, attention and experts in FLOP."""

    hbm: float
    attention: float
    experts: float
    net: float


@dataclass(frozen=True)
class LayerWork:
    """What one rank does in one layer; *_bytes in bytes, *_flop in FLOP, latency in seconds."""

    attention_bytes: float
    attention_flop: float
    expert_bytes: float
    expert_flop: float
    sent_bytes: float
    latency: float = 0.0


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer by part."""

    attention: float
    experts: float
    communication: float

    @property
    def overlapped(self) -> float:
        """Communication hidden behind computation as far as possible."""
        return max(self.attention + self.experts, self.communication)

    @property
    def serial(self) -> float:
        return self.attention + self.experts + self.communication


def layer_time(work: LayerWork, rates: Rates) -> LayerTime:
    """The roofline of one layer."""
    return LayerTime(
        attention=max(work.attention_bytes / rates.hbm, work.attention_flop / rates.attention),
        experts=max(work.expert_bytes / rates.hbm, work.expert_flop / rates.experts),
        communication=work.sent_bytes / rates.net + work.latency,
    )
