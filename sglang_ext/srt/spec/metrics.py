"""What speculation earns, as Prometheus metrics and as a warning when it earns nothing."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from sglang_ext.core.spec.types import VerifyPlan

logger = logging.getLogger(__name__)

_WARN_AFTER = 200
_NEAR_ONE = 1.1


class RoundMetrics:
    """Counts drafts per position: proposed, admitted to verification, accepted.

    enabled: whether the server exports metrics; the warning is given either way.
    """

    def __init__(self, gamma: int, algorithm: str, enabled: bool) -> None:
        self.algorithm = algorithm
        self._drafted_rounds = 0
        self._committed = 0
        self._warned = False
        self._rows: Counter | None = None
        self._rounds: Counter | None = None
        if enabled:
            self._rows = Counter(
                "sglang_ext_spec_drafts",
                "Drafted tokens by position in the block and by how far they got.",
                ["stage", "position"],
            )
            self._rounds = Counter("sglang_ext_spec_rounds", "Requests served per round.", ["kind"])
        self.gamma = gamma

    def plain(self, requests: int) -> None:
        """A round that did not draft."""
        if self._rounds is not None:
            self._rounds.labels("plain").inc(requests)

    def drafted(self, plan: VerifyPlan, proposed: list[bool], accepted: list[int]) -> None:
        """A round that drafted for the requests flagged in `proposed`."""
        count = sum(proposed)
        self._note_acceptance(plan, accepted)
        if self._rows is None or self._rounds is None:
            return
        self._rounds.labels("drafted").inc(count)
        self._rounds.labels("plain").inc(len(proposed) - count)
        for position in range(1, self.gamma + 1):
            admitted = sum(n >= position for n in plan.counts)
            kept = sum(n >= position for n in accepted)
            self._rows.labels("proposed", position).inc(count)
            self._rows.labels("admitted", position).inc(admitted)
            self._rows.labels("accepted", position).inc(kept)

    def _note_acceptance(self, plan: VerifyPlan, accepted: list[int]) -> None:
        """Warn once when the drafts that were verified are almost never right."""
        tried = [a for a, n in zip(accepted, plan.counts, strict=True) if n > 0]
        self._drafted_rounds += len(tried)
        self._committed += sum(tried) + len(tried)
        if self._warned or self._drafted_rounds < _WARN_AFTER:
            return
        length = self._committed / self._drafted_rounds
        self._warned = length < _NEAR_ONE
        if self._warned:
            logger.warning(
                "%s: acceptance length %.2f over %d drafted rounds: the draft is almost never "
                "right. Usual causes: a draft trained for another target or another version of "
                "it, target_layer_ids or mask_token_id that are not the trained ones, or a block "
                "layout read one row off (sample_from_anchor). Output is exact all the same.",
                self.algorithm,
                length,
                self._drafted_rounds,
            )
        self._drafted_rounds = self._committed = 0
