"""Which drafts to verify: the hardware-aware prefix scheduler (arXiv:2607.05147, 3.2.2 and 5.2).

Draft j of request r survives with probability a_{r,j} = prod_{i<=j} c_{r,i}. Admitting a set of
prefixes makes B = R + drafts rows and tau = R + sum of survivals expected tokens per step, hence
Theta = tau / seconds(B) tokens per second over all live requests.

Whether x_k is verified must not depend on x_k itself, and a_{k+1} does depend on x_k. Stopping at
the first draft that does not raise Theta keeps the decision on x_k a function of x_{<k}; taking
the best Theta of the whole list would not (the paper's Appendix A).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_ext.core.spec.sps import Array, SpeedTable

# Below this a draft is not worth a row of history (asynchronous variant).
_NEGLIGIBLE = 1e-6


def schedule_prefixes(
    survivals: Array,
    table: SpeedTable | None,
    *,
    draft_seconds: float = 0.0,
    caps: Sequence[int] | None = None,
) -> list[int]:
    """Algorithm 1: global over the requests, early stop.

    survivals:     [R, G], non-increasing along G
    table:         None verifies everything
    draft_seconds: time of this round's draft, 0 for the paper's Theta; from history only
    caps:          [R] most drafts of each request, None for G
    returns [R] admitted drafts
    """
    requests, gamma = survivals.shape
    if table is None:
        return _clipped([gamma] * requests, caps)
    order, gains = _ranking(_capped(survivals, caps))
    theta = throughput(gains, requests, table, draft_seconds)
    falls = np.flatnonzero(theta[1:] <= theta[:-1])
    admitted = int(falls[0]) if len(falls) else len(order)
    return _lengths(order[:admitted], requests)


def capacity(history: Array, table: SpeedTable | None, *, draft_seconds: float = 0.0) -> int:
    """How many drafts in all are worth verifying, judged by past survivals [R, G].

    The best Theta of the whole list: history was fixed before the current block was drawn, so
    the search cannot see it.
    """
    if table is None:
        return history.size
    gains = np.sort(history[history >= _NEGLIGIBLE])[::-1]
    return int(throughput(gains, history.shape[0], table, draft_seconds).argmax())


def admit(survivals: Array, budget: int, caps: Sequence[int] | None = None) -> list[int]:
    """The `budget` likeliest drafts; ties go to the earlier position, then the earlier request.

    Survivals do not rise along a request, so a later draft never displaces an earlier one, and
    the choice on x_k stays a function of x_{<k}.
    """
    order, _ = _ranking(_capped(survivals, caps))
    return _lengths(order[:budget], survivals.shape[0])


def throughput(gains: Array, requests: int, table: SpeedTable, draft_seconds: float = 0.0) -> Array:
    """Theta, expected tokens per second over all requests.

    gains: [n] survivals in the order of admission  ->  [n+1], after admitting 0 .. n of them
    """
    tau = np.empty(len(gains) + 1)
    tau[0] = requests
    np.cumsum(gains, out=tau[1:])
    tau[1:] += requests
    return tau / (table.seconds(requests, requests + len(gains)) + draft_seconds)


class LaggedScheduler:
    """Asynchronous variant: the size of a verification is known before its confidences are.

    The capacity comes from confidences `lag` rounds old, the ranking from the current ones.
    A request without history that old counts as certain to survive.
    """

    def __init__(self, table: SpeedTable | None, lag: int = 2) -> None:
        if lag < 1:
            raise ValueError(
                f"lag: expected at least 1 round, found {lag}; use schedule_prefixes for no lag"
            )
        self.table = table
        self._past: deque[tuple[dict[Hashable, int], Array]] = deque(maxlen=lag)
        self._lag = lag

    def plan(
        self,
        requests: Sequence[Hashable],
        survivals: Array,
        *,
        draft_seconds: float = 0.0,
        caps: Sequence[int] | None = None,
    ) -> list[int]:
        """[R] admitted drafts; remembers `survivals` [R, G] under the requests' keys."""
        if self.table is None:
            lengths = _clipped([survivals.shape[1]] * len(requests), caps)
        else:
            history = _capped(self._history(requests, survivals.shape[1]), caps)
            budget = capacity(history, self.table, draft_seconds=draft_seconds)
            lengths = admit(survivals, budget, caps)
        self._past.append(({key: r for r, key in enumerate(requests)}, survivals.copy()))
        return lengths

    def _history(self, requests: Sequence[Hashable], gamma: int) -> Array:
        if len(self._past) < self._lag or self._past[0][1].shape[1] != gamma:
            return np.ones((len(requests), gamma))
        index, past = self._past[0]
        at = [index.get(key, len(past)) for key in requests]
        return np.vstack((past, np.ones((1, gamma))))[at]


def _capped(survivals: Array, caps: Sequence[int] | None) -> Array:
    if caps is None:
        return survivals
    beyond = np.arange(survivals.shape[1]) >= np.asarray(caps)[:, None]
    return np.where(beyond, 0.0, survivals)


def _clipped(lengths: list[int], caps: Sequence[int] | None) -> list[int]:
    if caps is None:
        return lengths
    return [min(n, int(cap)) for n, cap in zip(lengths, caps, strict=True)]


def _ranking(survivals: Array) -> tuple[NDArray[np.int64], Array]:
    """The drafts that can survive: survival descending, position ascending, request ascending.

    returns ([n] flat indices j * R + r, [n] their survivals)
    """
    flat = survivals.T.ravel()
    order = np.argsort(-flat, kind="stable")
    gains = flat[order]
    live = int(np.count_nonzero(gains > 0.0))
    return order[:live], gains[:live]


def _lengths(admitted: NDArray[np.int64], requests: int) -> list[int]:
    counts: list[int] = np.bincount(admitted % requests, minlength=requests).tolist()
    return counts
