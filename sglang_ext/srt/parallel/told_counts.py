"""Counts of an exchange, by which a rank whose input is wrong tells the others: all raise together.

Without it a rank would raise alone, and its peers wait for its rows until the group's time-out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sglang_ext.core.dispatch import DispatchError
from sglang_ext.srt.parallel.row_exchange import RowExchange

LIMIT = "num_max_dispatch_tokens_per_rank"
# In place of a count, -1 - n says that field n was refused.
_FIELDS = ("x", "topk_idx", "topk_weights", "is_token_in_rank", "num_tokens_per_rank", LIMIT)


@contextmanager
def told(exchange: RowExchange, width: int, device: torch.device) -> Iterator[None]:
    """Around the checks of an input: a DispatchError goes to all ranks in place of the counts.

    width: counts per rank, as the peers will send; the error's field is one of `_FIELDS`.
    """
    try:
        yield
    except DispatchError as error:
        code = -1 - _FIELDS.index(error.field)
        exchange.counts(torch.full((exchange.ranks, width), code, device=device))
        raise


def counts(exchange: RowExchange, sent: Tensor) -> Tensor:
    """sent [R, width] int64, row r for rank r -> [R, width], row r from rank r.

    Raises:
        DispatchError: another rank has refused its input; names the rank and the field.
    """
    arriving = exchange.counts(sent)
    refused = {r: -1 - n for r, n in enumerate(arriving[:, 0].tolist()) if n < 0}
    if refused:
        raise DispatchError(
            " and ".join(sorted({_FIELDS[n] for n in refused.values()})),
            expected="accepted on every rank",
            found=f"refused on ranks {list(refused)}",
            remedy="Their errors say why.",
        )
    return arriving
