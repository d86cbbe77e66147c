"""Prepares what an EAGLE draft reads after a verify: accepted tokens, their slots, shifted ids."""

from __future__ import annotations

import torch


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Picks the last accepted token of each request.

    Args:
        accept_tokens: [batch * accept_stride] int32, row-major.
        accept_lens: [batch] int32, accepted tokens, the bonus included.
        bonus_tokens: [batch] int32, written in place.
        accept_stride: width of a request's row in `accept_tokens`.
    """
    rows = torch.arange(accept_lens.numel(), device=accept_lens.device) * accept_stride
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Packs the KV slots of the accepted rows to the front.

    Args:
        accept_index: [n] int, row in `out_cache_loc` or -1 for a rejected one.
        out_cache_loc: [rows] int64.
        accept_out_cache_loc: [>= accepted] int64, written in place from the front.
    """
    flat = accept_index.reshape(-1)
    slots = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Drops each request's first token, moves the others one to the left and appends a new one.

    Args:
        input_ids: [tokens] int64, written in place.
        extend_start_loc: [batch] int, first token of each request.
        extend_seq_lens: [batch] int; a request of length 0 is left alone.
        topk_index: [batch] int64 (or [batch, 1]), the token to append.
        select_index: [batch] int64, where the new token goes instead of the segment's end.
    """
    lengths = extend_seq_lens.long()
    starts = extend_start_loc.long()
    live = lengths > 0
    moved = (lengths - 1).clamp_(min=0)
    first = moved.cumsum(0) - moved
    target = torch.arange(int(moved.sum()), device=input_ids.device)
    target += torch.repeat_interleave(starts - first, moved)
    input_ids[target] = input_ids[target + 1]
    last = starts + lengths - 1 if select_index is None else select_index.long()
    input_ids[last[live]] = topk_index.reshape(-1)[live].to(input_ids.dtype)
