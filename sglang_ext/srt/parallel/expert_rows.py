"""How the rows of one layer reach the ranks of their experts, and their sums come back.

Attention runs on the rows of one attention-DP rank, the same rows on every rank of its attention-TP
group; experts are spread over all ranks. Three ways between the two:

    replicated  every rank has all rows and adds up what its experts made of them
    gathered    attention DP, or a prefill under context parallelism: every rank gathers the rows
                of all, and takes the sums of its own back
    exchanged   `--moe-a2a-backend`: a rank sends its share of its group's rows; the dispatcher
                brings whole sums back, and the group puts the shares together again
A row travels with its choice of experts, so a router sees the rows of its own rank alone, with
their token ids, and knows which of them are padding.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel
from torch import Tensor


class ExpertRows:
    """The way of one MoE layer."""

    def __init__(self) -> None:
        self.exchanged = not get_moe_a2a_backend().is_none()

    def _gathered(self, batch: Any) -> bool:
        return not self.exchanged and (get_parallel().attn_dp_size > 1 or _is_split(batch))

    def there(
        self, x: Tensor, choice: StandardTopKOutput, batch: Any
    ) -> tuple[Tensor, StandardTopKOutput]:
        """x [rows, hidden] of this rank -> what its experts, or its exchange, are given."""
        gathered = self._gathered(batch)
        if not (self.exchanged or gathered):
            return x, choice
        parallel = get_parallel()
        own = shares(x.shape[0], parallel.attn_tp_size)
        first = sum(own[: parallel.attn_tp_rank])
        mine = slice(first, first + own[parallel.attn_tp_rank])
        parts = [x[mine], choice.topk_ids[mine], choice.topk_weights[mine]]
        if gathered:
            parts = parallel.tp_group.all_gatherv(parts, sizes=rank_shares(batch))
        hidden, ids, weights = parts
        return hidden, StandardTopKOutput(weights, ids, None)

    def back(self, y: Tensor, rows: int, batch: Any) -> Tensor:
        """What came of the rows of `there` -> [rows, hidden] of this rank, complete."""
        gathered = self._gathered(batch)
        if not (self.exchanged or gathered):
            return tensor_model_parallel_all_reduce(y)
        parallel = get_parallel()
        if gathered:
            y = parallel.tp_group.reduce_scatterv(y.contiguous(), sizes=rank_shares(batch))
        if parallel.attn_tp_size == 1:
            return y
        sizes = shares(rows, parallel.attn_tp_size)
        whole: Tensor = parallel.attn_tp_group.all_gatherv(y.contiguous(), sizes=sizes)
        return whole


def shares(rows: int, ranks: int) -> list[int]:
    """Rows of each rank where `ranks` ranks split `rows` in order, as evenly as they can."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def rank_shares(batch: Any) -> list[int]:
    """Rows that each tensor-parallel rank brings: its share of its attention group's rows."""
    groups: list[int]
    if _is_split(batch):
        groups = batch.attn_cp_metadata.per_rank_actual_token
    else:
        groups = batch.global_num_tokens_cpu
    return [part for rows in groups for part in shares(rows, get_parallel().attn_tp_size)]


def _is_split(batch: Any) -> bool:
    """Whether each rank of an attention-CP group has rows of its own."""
    return getattr(batch, "attn_cp_metadata", None) is not None
