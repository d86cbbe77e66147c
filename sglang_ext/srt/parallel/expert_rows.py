"""How the rows of one layer reach the ranks of their experts, and their sums come back.

Attention runs on the rows of one attention-DP rank, the same rows on every rank of its attention-TP
group; experts are spread over all ranks. Three ways between the two:

    replicated  no attention DP: every rank has all rows and adds up what its experts made of them
    gathered    every rank gathers the rows of all, and takes the sums of its own back
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
    """The way of one MoE layer; what it is follows from the ranks at hand when it is built."""

    def __init__(self) -> None:
        self.exchanged = not get_moe_a2a_backend().is_none()
        self.gathered = not self.exchanged and get_parallel().attn_dp_size > 1

    def there(
        self, x: Tensor, choice: StandardTopKOutput, batch: Any
    ) -> tuple[Tensor, StandardTopKOutput]:
        """x [rows, hidden] of this rank -> what its experts, or its exchange, are given."""
        if not (self.exchanged or self.gathered):
            return x, choice
        parallel = get_parallel()
        own = shares(x.shape[0], parallel.attn_tp_size)
        first = sum(own[: parallel.attn_tp_rank])
        mine = slice(first, first + own[parallel.attn_tp_rank])
        parts = [x[mine], choice.topk_ids[mine], choice.topk_weights[mine]]
        if self.gathered:
            parts = parallel.tp_group.all_gatherv(parts, sizes=rank_shares(batch))
        hidden, ids, weights = parts
        return hidden, StandardTopKOutput(weights, ids, None)

    def back(self, y: Tensor, rows: int, batch: Any) -> Tensor:
        """What came of the rows of `there` -> [rows, hidden] of this rank, complete."""
        if not (self.exchanged or self.gathered):
            return tensor_model_parallel_all_reduce(y)
        parallel = get_parallel()
        if self.gathered:
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
    """Rows that each tensor-parallel rank brings: its share of its attention-DP rank's rows."""
    per_dp: list[int] = batch.global_num_tokens_cpu
    return [part for rows in per_dp for part in shares(rows, get_parallel().attn_tp_size)]
