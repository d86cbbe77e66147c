"""Which ranks decide together under a parallel layout, and how they learn each other's rows.

The ranks that serve the same requests (attention TP, and attention CP, of one attention-DP rank)
must verify the same drafts and commit the same tokens. The other DP ranks serve other requests,
but every target forward is one for all of them: it needs the number of rows each will bring, and
a verification brings a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed.parallel_state import get_world_group, init_model_parallel_group
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.runtime_context import get_flags, get_parallel
from sglang.srt.utils.common import require_mlp_sync, require_mlp_tp_gather


def peers_of_request() -> Any:
    """The group of ranks that hold the same requests; its first rank decides.

    Every rank must call this at the same point: it may create groups.
    """
    parallel = get_parallel()
    if not parallel.attn_dp_enabled:
        return parallel.tp_group
    if parallel.attn_cp_size == 1:
        return parallel.attn_tp_group
    # SGLang has no group that spans attention TP and CP of one DP rank.
    width = parallel.tp_size // parallel.attn_dp_size
    world = get_world_group()
    ranks = [list(range(i, i + width)) for i in range(0, world.world_size, width)]
    backend = dist.get_backend(world.device_group)
    return init_model_parallel_group(
        ranks, world.local_rank, backend, group_name="sglang_ext_spec_peers"
    )


def dp_slots() -> int:
    """How many DP ranks' row counts a forward carries: 0 for none, 1 for this rank's own."""
    if not require_mlp_sync():
        return 0
    return get_parallel().attn_dp_size if require_mlp_tp_gather() else 1


def set_rows(forward_batch: Any, rows: int, slots: int) -> None:
    """Put this rank's `rows`, and the others', into a verification's batch.

    SGLang multiplies requests by one width for all ranks; a verification has a width per request.
    Here a "request" of the padding arithmetic is a row (`num_tokens_per_req` is 1).

    slots: see `dp_slots`; above 1 every rank must call this at the same point.
    """
    if slots == 0:
        return
    counts = [rows] if slots == 1 else rows_of_dp_ranks(rows, slots)
    device = forward_batch.input_ids.device
    forward_batch.batch_size = rows
    forward_batch.global_num_tokens_cpu = counts
    forward_batch.global_num_tokens_for_logprob_cpu = list(counts)
    forward_batch.original_global_num_tokens_cpu = list(counts)
    forward_batch.global_num_tokens_gpu = torch.tensor(counts, dtype=torch.int64, device=device)
    forward_batch.global_num_tokens_for_logprob_gpu = forward_batch.global_num_tokens_gpu.clone()


def rows_of_dp_ranks(rows: int, slots: int) -> list[int]:
    """This rank's number of rows -> the number of each of `slots` DP ranks, in order."""
    group = get_parallel().tp_group
    mine = torch.tensor([rows], dtype=torch.int64)
    each = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(each, mine, group=group.cpu_group)
    return [int(each[i]) for i in range(0, group.world_size, group.world_size // slots)]


@contextmanager
def without_exchange() -> Iterator[None]:
    """Experts built and run inside are not spread by `--moe-a2a-backend`."""
    moe = get_flags().moe
    before, moe.a2a_backend = moe.a2a_backend, MoeA2ABackend.NONE
    try:
        yield
    finally:
        moe.a2a_backend = before
