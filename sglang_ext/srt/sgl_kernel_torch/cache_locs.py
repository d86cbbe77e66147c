"""Moves KV slot numbers between a flat list and the request table.

The request table `req_to_token` [requests, pool_len] int32 holds, for every request, the KV slot
of each of its tokens. The three functions here write or read one segment per request.
"""

from __future__ import annotations

import torch


def _segment_indices(
    req_pool_indices: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every table cell in the segments, packed request after request.

    Args:
        req_pool_indices: [batch] table row of each request.
        starts: [batch] int64, first column of the segment.
        lengths: [batch] int64, columns in the segment.

    Returns:
        rows, columns: [sum(lengths)] int64 each.
    """
    rows = torch.repeat_interleave(req_pool_indices.long(), lengths)
    packed_starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts - packed_starts, lengths)
    return rows, torch.arange(rows.numel(), device=rows.device) + shift


def _check_room(function: str, out_cache_loc: torch.Tensor, needed: int) -> None:
    if out_cache_loc.numel() < needed:
        raise ValueError(
            f"{function}: out_cache_loc: expected at least {needed} entries, as many as the "
            f"segments hold, found {out_cache_loc.numel()}"
        )


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes packed slots into the table: row r, columns [start, end) of each request.

    Args:
        req_pool_indices: [batch] int, table row of each request.
        req_to_token: [requests, pool_len] int32, written in place.
        start_offset, end_offset: [batch] int.
        out_cache_loc: [>= sum(end - start)] int64, read in request order.
        pool_len: columns of the table.

    Raises:
        ValueError: `out_cache_loc` is shorter than the segments.
    """
    starts = start_offset.long()
    rows, columns = _segment_indices(req_pool_indices, starts, end_offset.long() - starts)
    _check_room("assign_req_to_token_pool_cpu", out_cache_loc, rows.numel())
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Reads the slots of row r, columns [start, end) of each request into a packed list.

    Arguments as in `assign_req_to_token_pool_cpu`; `out_cache_loc` is written in place and what
    lies beyond the segments is left as it was.

    Raises:
        ValueError: `out_cache_loc` is shorter than the segments.
    """
    starts = start_offset.long()
    rows, columns = _segment_indices(req_pool_indices, starts, end_offset.long() - starts)
    _check_room("assign_extend_cache_locs_cpu", out_cache_loc, rows.numel())
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Reads the `topk * num_steps` slots that follow each request's committed tokens.

    Args:
        req_pool_indices: [batch] int, table row of each request.
        req_to_token: [requests, pool_len] int32.
        seq_lens: [batch] int, committed tokens.
        out_cache_loc: [batch * topk * num_steps] int64, written in place.
        pool_len: columns of the table.
    """
    offsets = torch.arange(topk * num_steps, device=req_to_token.device)
    columns = seq_lens.long().unsqueeze(1) + offsets
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc.copy_(slots.flatten())


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """One table row per draft branch: the committed prefix, then the slots of that branch.

    Args:
        req_to_token: [requests, pool_len] int32.
        req_pool_indices: [batch] int, table row of each request.
        seq_lens: [batch] int, committed tokens; branch t owns the columns from
            `seq_len + t * num_steps` on.

    Returns:
        [batch * topk, pool_len] int32; only the first `seq_len + num_steps` columns mean anything.
    """
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    prefix = seq_lens.long().repeat_interleave(topk)
    branch = torch.arange(topk, device=rows.device).repeat(seq_lens.numel())
    steps = torch.arange(num_steps, device=rows.device)
    source = (prefix + branch * num_steps).unsqueeze(1) + steps
    return rows.scatter(1, prefix.unsqueeze(1) + steps, rows.gather(1, source))
