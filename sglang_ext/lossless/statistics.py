"""Two-sample tests on token counts, many at once, and what they would have seen.

Pearson's chi-square of homogeneity over a table of two rows (Pearson 1900); Holm's step-down
procedure (Holm 1979) keeps the chance of any false alarm below alpha under every dependence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

# Cells with fewer observations on both sides together are pooled: about 5 expected on each.
LEAST_IN_CELL = 10


@dataclass(frozen=True)
class Homogeneity:
    """Test statistic of one comparison, or of several added up.

    statistic: asymptotically chi-square with `freedom` degrees of freedom where the laws agree
    left, right: observations that entered
    """

    statistic: float
    freedom: int
    left: int
    right: int

    @property
    def p_value(self) -> float:
        return float(chi2.sf(self.statistic, self.freedom)) if self.freedom else 1.0

    def __add__(self, other: Homogeneity) -> Homogeneity:
        return Homogeneity(
            self.statistic + other.statistic,
            self.freedom + other.freedom,
            self.left + other.left,
            self.right + other.right,
        )

    def visible_distance(self, level: float, power: float) -> float:
        """Smallest total-variation distance seen with chance `power` at significance `level`.

        Holds for every way the laws may differ on the tested cells: by Cauchy-Schwarz the
        non-centrality of a distance d is at least 4 d^2 / (1/left + 1/right). 1.0 when no
        distance would be seen.
        """
        if not self.freedom or not self.left or not self.right:
            return 1.0
        needed = _noncentrality(self.freedom, level, power)
        return min(1.0, math.sqrt(needed * (1 / self.left + 1 / self.right)) / 2)


EMPTY = Homogeneity(0.0, 0, 0, 0)


def homogeneity(left: Counter[Hashable], right: Counter[Hashable]) -> Homogeneity:
    """Chi-square over the cells of two samples; rare cells are pooled into one.

    The pool joins the rarest kept cell where it is itself too small.
    """
    total = Counter(left)
    total.update(right)
    kept = [cell for cell, count in total.most_common() if count >= LEAST_IN_CELL]
    cells = [(left.get(cell, 0), right.get(cell, 0)) for cell in kept]
    n, m = sum(left.values()), sum(right.values())
    rest = (n - sum(a for a, _ in cells), m - sum(b for _, b in cells))
    if sum(rest) >= LEAST_IN_CELL or not cells:
        cells.append(rest)
    elif sum(rest):
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    if not n or not m or len(cells) < 2:
        return Homogeneity(0.0, 0, n, m)
    # Sum over cells and samples of (observed - expected)^2 / expected, for two rows.
    statistic = sum((a * m - b * n) ** 2 / (a + b) for a, b in cells) / (n * m)
    return Homogeneity(statistic, len(cells) - 1, n, m)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses are rejected at family-wise error rate `alpha`."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = [False] * len(p_values)
    for rank, at in enumerate(order):
        if p_values[at] > alpha / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected


def _noncentrality(freedom: int, level: float, power: float) -> float:
    """Non-centrality at which a chi-square test at `level` rejects with chance `power`."""
    edge = chi2.isf(level, freedom)

    def short(value: float) -> float:
        return float(ncx2.sf(edge, freedom, value)) - power

    high = edge
    while short(high) < 0:
        high *= 2
    return float(brentq(short, 1e-9, high, xtol=1e-6))
