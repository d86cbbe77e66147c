"""How far rounds take longer here and now than they did when speeds were measured.

A table measured once is wrong by what else the machine does, by longer contexts, by a noisy
measurement. What both kinds of round share cancels in the gate's comparison; what only one of
them suffers has to be seen on that one, so a batch size is also shown a few plain rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ext.core.spec.gate import size_class


@dataclass
class _Drift:
    """Moving average of actual / predicted seconds."""

    factor: float = 1.0
    rounds: int = 0

    def add(self, ratio: float, memory: float) -> None:
        self.rounds += 1
        weight = max(1.0 / self.rounds, 1.0 - memory)
        self.factor += weight * (ratio - self.factor)


@dataclass
class RoundClock:
    """Corrections per size class of the batch, for plain and for drafted rounds.

    memory: weight of the past
    samples: plain rounds a size class is shown after as many drafted ones
    clip: a single round counts as at most this many times the prediction
    """

    memory: float = 0.9
    samples: int = 3
    clip: float = 4.0
    _plain: dict[int, _Drift] = field(default_factory=dict)
    _drafted: dict[int, _Drift] = field(default_factory=dict)

    def note(self, requests: int, *, drafted: bool, seconds: float, predicted: float) -> None:
        """Record one round of `requests` requests."""
        side = self._drafted if drafted else self._plain
        drift = side.setdefault(size_class(requests), _Drift())
        drift.add(min(seconds / predicted, self.clip), self.memory)

    def wants_plain(self, requests: int) -> bool:
        """Whether a plain round is due because this batch size has been seen drafted only."""
        key = size_class(requests)
        plain, drafted = self._plain.get(key), self._drafted.get(key)
        seen = 0 if plain is None else plain.rounds
        return drafted is not None and drafted.rounds >= self.samples and seen < self.samples

    def factors(self, requests: int) -> tuple[float, float]:
        """(plain, drafted) multipliers; what is not known yet is taken from the other side."""
        key = size_class(requests)
        plain, drafted = self._plain.get(key), self._drafted.get(key)
        if plain is None:
            return (1.0, 1.0) if drafted is None else (drafted.factor, drafted.factor)
        return plain.factor, plain.factor if drafted is None else drafted.factor
