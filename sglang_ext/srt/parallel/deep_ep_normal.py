"""Normal mode of DeepEP's contract: one copy of a token per destination rank, plain sum back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_ext.core.dispatch import (
    DispatchError,
    ExpertShards,
    aligned,
    normal_copies,
    sum_copies,
)
from sglang_ext.srt.parallel import told_counts
from sglang_ext.srt.parallel.deep_ep_types import NormalHandle, check_rows
from sglang_ext.srt.parallel.row_exchange import RowExchange, Traffic
from sglang_ext.srt.parallel.told_counts import told

Rows = Tensor | tuple[Tensor, Tensor]


class Received(NamedTuple):
    """Rows that reached this rank's experts.

    x: [N, H], or (fp8 [N, H], scales [N, H/128]), like what was sent
    topk_idx: [N, K], local expert numbers, -1 for one elsewhere; None when none was sent
    topk_weights: [N, K] float32, 0 where topk_idx is -1; None when none was sent
    per_expert: [E/R] rows of each local expert, rounded up to the alignment; empty for a fixed size
    """

    x: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    per_expert: list[int]
    handle: NormalHandle


def dispatch(
    exchange: RowExchange,
    traffic: Traffic,
    x: Rows,
    *,
    in_rank: Tensor,
    tokens_per_expert: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    alignment: int,
    worst: int,
) -> Callable[[], Received]:
    """Starts sending each token once to every rank of `in_rank`; the call returned waits.

    Arguments as `Buffer.dispatch`. Wrong on one rank, every rank raises.
    """
    shards = ExpertShards(len(tokens_per_expert), exchange.ranks)
    with told(exchange, 1 + shards.per_rank, in_rank.device):
        columns = _columns(x)
        tokens = columns[0].shape[0]
        check_rows("is_token_in_rank", in_rank.shape[0], tokens)
        if topk_idx is not None:
            shards.check(topk_idx)
            check_rows("topk_idx", topk_idx.shape[0], tokens)
        if topk_weights is not None:
            check_rows("topk_weights", topk_weights.shape[0], tokens)
    copies = normal_copies(in_rank, tokens_per_expert)

    per_rank = torch.tensor(copies.per_rank, device=in_rank.device)[:, None]
    counts = torch.cat([per_rank, copies.per_expert.view(exchange.ranks, -1)], dim=1)
    arriving = told_counts.counts(exchange, counts)
    received = arriving[:, 0].tolist()
    handle = NormalHandle(copies, received, tokens)

    sent = [c[copies.rows] for c in columns]
    if topk_idx is not None:
        sent.append(shards.local(topk_idx[copies.rows], copies.destinations()[:, None]))
    if topk_weights is not None:
        sent.append(topk_weights[copies.rows].float())
    finish = exchange.rows(sent, copies.per_rank, received, traffic)

    def arrive() -> Received:
        rows = _fixed_size(finish(), worst)
        idx = rows[len(columns)] if topk_idx is not None else None
        if idx is not None:
            idx[sum(received) :] = -1
        weights = rows[-1] if topk_weights is not None else None
        if weights is not None and idx is not None:
            weights = weights.masked_fill(idx < 0, 0.0)
        counted = arriving[:, 1:].sum(dim=0).tolist()
        per_expert = [] if worst else [aligned(n, alignment) for n in counted]
        return Received(_like(x, rows), idx, weights, per_expert, handle)

    return arrive


def dispatch_again(
    exchange: RowExchange, traffic: Traffic, x: Rows, handle: NormalHandle, worst: int
) -> Rows:
    """Other rows along the ways of an earlier dispatch; no counts are exchanged."""
    columns = _columns(x)
    check_rows("x", columns[0].shape[0], handle.tokens)
    sent = [c[handle.copies.rows] for c in columns]
    rows = exchange.rows(sent, handle.copies.per_rank, handle.received, traffic)()
    return _like(x, _fixed_size(rows, worst))


def combine(
    exchange: RowExchange,
    traffic: Traffic,
    x: Tensor,
    handle: NormalHandle,
    topk_weights: Tensor | None,
    bias: tuple[Tensor, ...],
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Starts rows back to their tokens; the call returned waits and sums them over ranks.

    Arguments as `Buffer.combine`.
    """
    count = sum(handle.received)
    if x.shape[0] < count:
        check_rows("x", x.shape[0], count)
    columns = [x[:count]]
    if topk_weights is not None:
        columns.append(topk_weights[:count].float())
    finish = exchange.rows(columns, handle.received, handle.copies.per_rank, traffic)

    def collect() -> tuple[Tensor, Tensor | None]:
        back = finish()
        total = sum_copies(back[0], handle.copies, handle.tokens, None)
        for term in bias:
            total = total + term.to(total.dtype)
        weights = None
        if topk_weights is not None:
            weights = sum_copies(back[1], handle.copies, handle.tokens, None)
        return total.to(x.dtype), weights

    return collect


def _columns(x: Rows) -> list[Tensor]:
    columns = list(x) if isinstance(x, tuple) else [x]
    if any(c.dim() != 2 for c in columns):
        raise DispatchError(
            "x",
            expected="[tokens, hidden] or (fp8 [tokens, hidden], scales [tokens, hidden / 128])",
            found=[list(c.shape) for c in columns],
            remedy="Flatten the batch into rows.",
        )
    return columns


def _like(x: Rows, rows: list[Tensor]) -> Rows:
    return (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]


def _fixed_size(rows: list[Tensor], worst: int) -> list[Tensor]:
    """Rows followed by zero rows up to `worst`; as they are for 0."""
    count = rows[0].shape[0]
    if worst and count > worst:
        raise DispatchError(
            "num_worst_tokens",
            expected=f"at least the {count} rows received",
            found=worst,
            remedy="Pass ranks * tokens per rank, the most that can arrive.",
        )
    if not worst:
        return rows
    return [_padded(r, worst) for r in rows]


def _padded(rows: Tensor, length: int) -> Tensor:
    # As bytes: an 8-bit float has no fill on every device, and zero bytes are zero in all types.
    padded = torch.zeros(
        (length, rows.shape[1] * rows.element_size()), dtype=torch.uint8, device=rows.device
    )
    padded[: rows.shape[0]] = rows.view(torch.uint8)
    return padded.view(rows.dtype)
