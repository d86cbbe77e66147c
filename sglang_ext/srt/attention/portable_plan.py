"""ForwardBatch -> AttentionPlan.

SGLang describes the rows of a forward differently per mode:
    EXTEND, MIXED, DRAFT_EXTEND_V2   extend_seq_lens rows, seq_lens includes them
    DECODE                           one row, seq_lens includes it
    TARGET_VERIFY                    spec_info says how many rows, seq_lens EXCLUDES them
A plan knows only slots, keys and rows per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_ext.kernels.attention import AttentionPlan, BandMasks, PlanCosts

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.spec_info import SpecInput

    from sglang_ext.srt.parallel.context import LocalRows


def build_plan(
    batch: ForwardBatch, req_to_token: torch.Tensor, masks: BandMasks, costs: PlanCosts
) -> AttentionPlan:
    """Plan of one forward.

    Args:
        batch: any mode but IDLE.
        req_to_token: [request rows, positions] int32; row 0 belongs to padding requests, whose
            query rows the plan leaves at zero.

    Raises:
        ValueError: a verify batch whose spec_info does not say how many rows it has.
    """
    pool_rows = batch.req_pool_indices.tolist()
    lengths = batch.seq_lens.tolist()
    tree = None
    if batch.forward_mode.is_target_verify():
        rows = verify_rows(batch.spec_info, len(lengths))
        lengths = [n + r for n, r in zip(lengths, rows, strict=False)]
        tree = tree_mask(batch.spec_info, lengths, rows)
    elif batch.forward_mode.is_decode():
        rows = [1] * len(lengths)
    else:
        rows = _extend_rows(batch)
    count = min(len(rows), len(lengths))
    keys = [n if p else 0 for n, p in zip(lengths[:count], pool_rows, strict=False)]
    slots = req_to_token[batch.req_pool_indices[:count], : max([*keys, 1])].long()
    if tree is not None and tree.shape[0] < count:
        tree = _pad_tree(tree, count)
    return AttentionPlan.build(slots, keys, rows[:count], masks=masks, tree=tree, costs=costs)


def split_plan(
    batch: ForwardBatch,
    req_to_token: torch.Tensor,
    local: LocalRows,
    masks: BandMasks,
    costs: PlanCosts,
) -> AttentionPlan:
    """Plan of this rank's runs of a prefill that is split over a CP group; see `build_plan`."""
    owners = batch.req_pool_indices[local.requests]
    slots = req_to_token[owners, : max([*local.keys, 1])].long()
    return AttentionPlan.build(
        slots, local.keys, local.rows, masks=masks, costs=costs, stride=local.stride
    )


def branch_plan(
    batch: ForwardBatch,
    req_to_token: torch.Tensor,
    step: int,
    *,
    topk: int,
    num_steps: int,
    page_size: int,
    masks: BandMasks,
    costs: PlanCosts,
) -> AttentionPlan:
    """Plan of step `step` of a draft decode with `topk` branches per request.

    Branch b of a request with n cached tokens reads those and the step + 1 tokens it drafted so
    far. They sit behind the prefix in the request's row: `num_steps` positions per branch, or,
    with several branches and pages, whole pages per branch that start with room for the tokens
    the prefix left in its last page.
    """
    prefix = batch.seq_lens.long()
    branch = torch.arange(topk, device=prefix.device)
    if page_size == 1 or topk == 1:
        first = prefix[:, None] + branch * num_steps
    else:
        partial = prefix % page_size
        pages = (partial + num_steps + page_size - 1) // page_size
        first = prefix[:, None] + branch * (pages * page_size)[:, None]
    column = torch.arange(int(prefix.max()) + step + 1, device=prefix.device)
    drafted = column - prefix[:, None]
    position = torch.where(
        drafted[:, None, :] < 0, column, first[:, :, None] + drafted[:, None, :].clamp(max=step)
    )
    table = req_to_token[batch.req_pool_indices]
    slots = table[:, None, :].expand(-1, topk, -1).gather(2, position).flatten(0, 1).long()
    real = (batch.req_pool_indices > 0).long() * (prefix + step + 1)
    keys = real.repeat_interleave(topk).tolist()
    return AttentionPlan.build(slots, keys, [1] * len(keys), masks=masks, costs=costs)


def verify_rows(spec_info: SpecInput, requests: int) -> list[int]:
    """Rows per request of a verify batch, from the first of these that spec_info carries:
    `ragged_verify_layout`, `verify_lens`, `draft_token_num`. A ragged list may be shorter than
    the batch: the requests beyond it are padding.
    """
    layout = getattr(spec_info, "ragged_verify_layout", None)
    if layout is not None:
        lens = layout.verify_lens_cpu
        return list(lens) if lens is not None else layout.verify_lens.tolist()
    lens = getattr(spec_info, "verify_lens", None)
    if lens is not None:
        return lens.tolist() if isinstance(lens, torch.Tensor) else list(lens)
    width = getattr(spec_info, "draft_token_num", None)
    if width is None:
        raise ValueError(
            f"spec_info: expected ragged_verify_layout, verify_lens or draft_token_num in a "
            f"verify batch, found {type(spec_info).__name__} without them"
        )
    return [int(width)] * requests


def tree_mask(spec_info: SpecInput, lengths: list[int], rows: list[int]) -> torch.Tensor | None:
    """Visibility among the drafted rows, [requests, width, width] bool, or None for a chain.

    `custom_mask` is flat and comes in two layouts: per request width x width, or
    width x (prefix + width), told apart by its size. It may cover fewer requests than the batch
    (the rest is padding) or end in filler.
    """
    flat = getattr(spec_info, "custom_mask", None)
    if flat is None or flat.numel() == 0 or getattr(spec_info, "tree_topk", -1) == 1:
        return None
    width = rows[0]
    if flat.numel() <= width * width * len(rows):
        return flat.view(-1, width, width).bool()
    trees, start = [], 0
    for length in lengths:
        stop = start + width * length
        if stop > flat.numel():
            break
        trees.append(flat[start:stop].view(width, length)[:, length - width :])
        start = stop
    return torch.stack(trees).bool()


def _pad_tree(tree: torch.Tensor, requests: int) -> torch.Tensor:
    width = tree.shape[1]
    chain = torch.ones(width, width, dtype=torch.bool, device=tree.device).tril()
    return torch.cat([tree, chain.expand(requests - tree.shape[0], -1, -1)])


def _extend_rows(batch: ForwardBatch) -> list[int]:
    lens = batch.extend_seq_lens_cpu
    if lens is not None:
        return list(lens)
    return batch.extend_seq_lens.tolist()
