"""Prefill context parallelism as an attention backend sees it.

SGLang splits the rows of a prefill over the ranks of an attention-CP group and leaves two things to
the backend: keys and values must be gathered before they are written (decode reads all of them on
every rank), and a row must be masked by its position in the request, not in the rank.

    zigzag      each request in 2 * cp blocks of consecutive rows; a rank holds block r and 2cp-1-r
    interleave  row i of the batch on rank i mod cp
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.cp.base import get_cp_strategy
from sglang.srt.layers.cp.interleave import InterleaveContextParallelMetadata
from sglang.srt.runtime_context import get_parallel

from sglang_ext.srt.parallel.seen import note


@dataclass(frozen=True)
class LocalRows:
    """The rows of a prefill that this rank holds, as runs inside requests.

    requests, keys, rows: per run: its request, the keys its last row sees (prefix included), its
        number of rows
    stride: positions from one row of a run to the next
    """

    requests: list[int]
    keys: list[int]
    rows: list[int]
    stride: int


def local_rows(batch: Any) -> LocalRows | None:
    """This rank's share of a prefill under CP; None where the forward is not split."""
    split = getattr(batch, "attn_cp_metadata", None)
    if split is None:
        return None
    if isinstance(split, InterleaveContextParallelMetadata):
        note("interleave CP prefill")
        strategy = get_cp_strategy()
        return dealt_rows(
            list(batch.extend_prefix_lens_cpu),
            list(batch.extend_seq_lens_cpu),
            strategy.cp_rank,
            strategy.cp_size,
        )
    note("zigzag CP prefill")
    count = len(split.kv_len_prev_list)
    return LocalRows(
        list(range(count)) * 2,
        [*split.kv_len_prev_list, *split.kv_len_next_list],
        [*split.actual_seq_q_prev_list, *split.actual_seq_q_next_list],
        stride=1,
    )


def dealt_rows(prefix: list[int], lengths: list[int], rank: int, size: int) -> LocalRows:
    """Interleave: row i of the batch belongs to rank i mod `size`, whatever its request."""
    runs = LocalRows([], [], [], size)
    for request, (start, length) in enumerate(
        zip(accumulate([0, *lengths[:-1]]), lengths, strict=True)
    ):
        first = start + (rank - start) % size
        count = len(range(first, start + length, size))
        if count:
            last = first + (count - 1) * size
            runs.requests.append(request)
            runs.keys.append(prefix[request] + last - start + 1)
            runs.rows.append(count)
    return runs


def real_rows(batch: Any) -> int | None:
    """Rows of this rank that are not padding, its first ones; None where nobody counted them."""
    split = getattr(batch, "attn_cp_metadata", None)
    if split is None:
        count: int | None = batch.global_num_token_non_padded_cpu
        return count
    held: list[int] = split.per_rank_logical_token or split.per_rank_actual_token
    return held[get_parallel().attn_cp_rank]


def gather_rows(x: torch.Tensor, batch: Any) -> torch.Tensor:
    """This rank's rows [local rows, ...] -> all rows of the prefill [rows, ...] in order."""
    return get_cp_strategy().gather_kv_cache(x.contiguous(), batch)
