"""Whether a round drafts at all: the draft's own time against what it has earned so far.

Everything consulted was known before the round began, so the decision cannot lean on the tokens it
is about: the output stays that of the target.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of the three things a round can do, for the batch at hand.

    decode: plain decoding of the batch; draft: proposing for it, feeding the draft included;
    verify: one verification of the rows that `DraftGate.expected_rows` foresees
    """

    decode: float
    draft: float
    verify: float


@dataclass
class _Earned:
    """What batches of similar size earned, and where their probing stands.

    tokens, rows: moving averages per request and drafted round
    plain_rounds, probing, patience: rounds since drafting was paused, drafted rounds left of a
        probe, plain rounds before the next one
    """

    tokens: float = 0.0
    rows: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0
    probing: int = 0
    patience: int = 0

    def add(self, tokens: float, rows: float, memory: float) -> None:
        self.rounds += 1
        weight = max(1.0 / self.rounds, 1.0 - memory)
        self.tokens += weight * (tokens - self.tokens)
        self.rows += weight * (rows - self.rows)


class DraftGate:
    """Drafts while drafting has been faster than decoding, and looks again now and then.

    memory:      weight of the past in the moving averages
    trial:       drafted rounds before a batch size is judged: a few unlucky ones must not end it
    probe:       drafted rounds of a probe
    probe_every: plain rounds before the first probe; doubles, up to eight times as many, while
                 probes fail
    margin:      how much faster plain decoding must have been, as a fraction, to stop drafting
    """

    def __init__(
        self,
        *,
        memory: float = 0.95,
        trial: int = 32,
        probe: int = 8,
        probe_every: int = 32,
        margin: float = 0.02,
    ) -> None:
        self.memory = memory
        self.trial = trial
        self.probe = probe
        self.probe_every = probe_every
        self.margin = margin
        self._earned: dict[int, _Earned] = {}
        self._skill: dict[Hashable, float] = {}

    def expected_rows(self, requests: int) -> int:
        """Verify rows to foresee for a batch of this size, anchor rows included."""
        earned = self._earned.get(size_class(requests))
        return requests if earned is None else max(requests, round(requests * earned.rows))

    def drafts(self, requests: Sequence[Hashable], times: RoundTimes) -> bool:
        """Decides the coming round, for keys that name the live requests."""
        earned = self._earned.get(size_class(len(requests)))
        if earned is None:
            return True
        if earned.rounds < self.trial or self._pays(requests, earned, times):
            earned.plain_rounds, earned.probing, earned.patience = 0, 0, self.probe_every
            return True
        if earned.probing:
            earned.probing -= 1
            return True
        earned.plain_rounds += 1
        if earned.plain_rounds <= earned.patience:
            return False
        earned.plain_rounds, earned.probing = 0, self.probe - 1
        earned.patience = min(2 * earned.patience, 8 * self.probe_every)
        return True

    def record(
        self, requests: Sequence[Hashable], committed: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Notes a drafted round: tokens committed and rows verified, per request."""
        if not requests:
            return
        count = len(requests)
        earned = self._earned.setdefault(size_class(count), _Earned())
        earned.add(sum(committed) / count, sum(rows) / count, self.memory)
        for key, tokens in zip(requests, committed, strict=True):
            skill = self._skill.get(key, 1.0)
            ratio = tokens / max(earned.tokens, 1.0)
            self._skill[key] = self.memory * skill + (1.0 - self.memory) * ratio

    def forget(self, requests: Iterable[Hashable]) -> None:
        """Drops requests that have left."""
        for key in requests:
            self._skill.pop(key, None)

    def _pays(self, requests: Sequence[Hashable], earned: _Earned, times: RoundTimes) -> bool:
        skill = sum(self._skill.get(key, 1.0) for key in requests)
        tokens = max(skill * earned.tokens, len(requests))
        drafted = tokens / (times.draft + times.verify)
        return drafted * (1.0 + self.margin) >= len(requests) / times.decode


def size_class(requests: int) -> int:
    """Batches of 1, 2, 3-4, 5-8, ... requests are judged apart."""
    return (requests - 1).bit_length()
