"""Two halves of a batch for two-batch overlap.

    decode          half of the requests
    prefill         between the requests where the token sums are most balanced; when the smaller
                    side would hold less than `threshold` of the tokens, inside one request, whose
                    second part attends to the first (two-chunk)
    verify          as prefill; SGLang's own takes half of the requests, of one width

The rules are those of SGLang 0.5.23 (`batch_overlap/two_batch_overlap.py`), where the threshold is
`--tbo-token-distribution-threshold`, 0.48 by default, and 0 turns two-chunk off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLD = 0.48


@dataclass(frozen=True)
class Halves:
    """A cut through the tokens of a batch, requests in order.

    requests: requests that begin in the first half
    tokens: tokens of the first half
    inside: tokens of the last such request that fall in the first half, None if it is not cut
    total: tokens of the batch
    """

    requests: int
    tokens: int
    inside: int | None
    total: int

    @property
    def second(self) -> int:
        """Tokens of the second half; 0 is legal, the half then still takes part in collectives."""
        return self.total - self.tokens


def split_by_requests(requests: int, rows_each: int = 1) -> Halves:
    """Decode (1 row each) or verify (1 + draft length); an odd request goes to the second half."""
    first = requests // 2
    return Halves(first, first * rows_each, None, requests * rows_each)


def split_by_tokens(lengths: Sequence[int], threshold: float = THRESHOLD) -> Halves:
    """Prefill of `lengths` [requests] new tokens each.

    Args:
        threshold: least share of the tokens that the smaller side of a cut between requests may
            have; in 0..0.5.
    """
    if not 0 <= threshold <= 0.5:
        raise ValueError(f"threshold: expected 0..0.5, found {threshold}")
    total = sum(lengths)
    cut, first = _most_balanced(lengths, total)
    if threshold * total <= first <= (1 - threshold) * total:
        return Halves(cut, first, None, total)
    before, held = _below_half(lengths, total)
    # A half with more requests than tokens has requests without a token; kernels refuse those.
    if before + 1 > total // 2:
        return Halves(cut, first, None, total)
    inside = total // 2 - held
    return Halves(before + (inside > 0), total // 2, inside or None, total)


def _most_balanced(lengths: Sequence[int], total: int) -> tuple[int, int]:
    """(requests, tokens) of the first half: the last cut before the halves differ more again."""
    cut, first, before = 0, 0, 0
    least: float = float("inf")
    for i, n in enumerate(lengths[:-1], start=1):
        before += n
        if abs(2 * before - total) > least:
            break
        cut, first, least = i, before, abs(2 * before - total)
    return cut, first


def _below_half(lengths: Sequence[int], total: int) -> tuple[int, int]:
    """(requests, tokens) that fit in the first half of the tokens whole."""
    before = 0
    for cut, n in enumerate(lengths):
        if before + n > total // 2:
            return cut, before
        before += n
    return 0, 0
