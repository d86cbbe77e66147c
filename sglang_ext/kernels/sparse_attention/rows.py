"""A pool and the rows of it that each query reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """What one pool gives to each query.

    Attributes:
        pool: [pool rows, dim] float; rows that nobody names may hold anything.
        index: [queries, width] int64, pool rows, -1 for none; width may be 0.
    """

    pool: Tensor
    index: Tensor  # type: ignore[assignment]  # the name a reader expects; tuple.index is unused
