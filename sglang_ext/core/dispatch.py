"""Index maths of the expert all-to-all: which copies of a token go where, and how they come back.

T tokens choose K experts each among E; rank r of R holds experts r * E/R up to (r+1) * E/R. A
choice of -1 is no choice. Two contracts, those of DeepEP (deepseek-ai/DeepEP, README):

    normal       one copy per (token, destination RANK). The expert side applies the gate weights
                 and adds up its experts; the way back is a plain sum over ranks.
    low latency  one copy per (token, EXPERT), into slots [E/R, M * R] on the expert's rank, where M
                 bounds the tokens of one rank. The way back is the sum weighted by the gate.

Both orders are deterministic: copies lie by destination, then by token; arrivals by source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class DispatchError(ValueError):
    """An argument of an expert exchange cannot be used: field, expected, found, remedy."""

    def __init__(self, field: str, *, expected: str, found: object, remedy: str) -> None:
        super().__init__(f"{field}: expected {expected}, found {found}. {remedy}")
        self.field = field


@dataclass(frozen=True)
class ExpertShards:
    """Equal, contiguous shards of the experts over the ranks of a group.

    experts: E, redundant copies included
    ranks: R

    Raises:
        DispatchError: E is not a multiple of R.
    """

    experts: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.experts < 1 or self.experts % self.ranks:
            raise DispatchError(
                "num_experts",
                expected=f"a positive multiple of the {self.ranks} ranks",
                found=self.experts,
                remedy="Add redundant experts until it is one (core.eplb.redundancy).",
            )

    @property
    def per_rank(self) -> int:
        return self.experts // self.ranks

    def check(self, topk_idx: Tensor) -> None:
        """Raises DispatchError unless topk_idx is [T, K] of whole numbers in -1..E-1."""
        whole = topk_idx.dtype in (torch.int32, torch.int64)
        if topk_idx.dim() != 2 or not whole:
            found = f"{list(topk_idx.shape)} {topk_idx.dtype}"
            raise DispatchError(
                "topk_idx",
                expected="[tokens, choices] int64 or int32",
                found=found,
                remedy="Pass the router's expert ids, one row per token.",
            )
        if topk_idx.numel() and (topk_idx.min() < -1 or topk_idx.max() >= self.experts):
            raise DispatchError(
                "topk_idx",
                expected=f"-1 or 0..{self.experts - 1}",
                found=f"{int(topk_idx.min())}..{int(topk_idx.max())}",
                remedy="Count redundant experts in num_experts; mark an unused choice with -1.",
            )

    def owners(self, topk_idx: Tensor) -> Tensor:
        """[T, K] expert ids -> [T, K] int64 ranks, -1 for no choice."""
        return torch.div(topk_idx.long(), self.per_rank, rounding_mode="floor").clamp(min=-1)

    def local(self, topk_idx: Tensor, rank: int | Tensor) -> Tensor:
        """[T, K] expert ids -> the same dtype, numbered from 0 on `rank`; -1 for one elsewhere.

        rank: of the group, or [T, 1] int64, one per row.
        """
        ids = topk_idx - rank * self.per_rank
        here = (ids >= 0) & (ids < self.per_rank) & (topk_idx >= 0)
        return torch.where(here, ids, -1).to(topk_idx.dtype)


@dataclass(frozen=True)
class ExpertBlocks:
    """The experts of a rank in consecutive blocks, as even as can be.

    Rows go back in as many parts: each in that of its last expert, when its sum is complete.
    """

    per_rank: int
    parts: int

    def experts(self, part: int) -> range:
        """Local numbers of the experts of a block."""
        first, end = (-(-p * self.per_rank // self.parts) for p in (part, part + 1))
        return range(first, end)

    def part_of(self, local: Tensor) -> Tensor:
        """[N, K] local expert numbers, -1 for one elsewhere -> [N] int64 part of each row."""
        last = local.long().amax(dim=1).clamp(min=0)
        return torch.div(last * self.parts, self.per_rank, rounding_mode="floor")


@dataclass(frozen=True)
class Layout:
    """What a rank will send in normal mode.

    tokens_per_rank: [R] int32, tokens with at least one choice on that rank
    tokens_per_node: [R / ranks_per_node] int32, likewise per node; None on a single node
    tokens_per_expert: [E] int32, choices of each expert
    in_rank: [T, R] bool, whether a token goes to a rank
    """

    tokens_per_rank: Tensor
    tokens_per_node: Tensor | None
    tokens_per_expert: Tensor
    in_rank: Tensor


def layout(topk_idx: Tensor, shards: ExpertShards, ranks_per_node: int = 8) -> Layout:
    """Normal-mode layout of topk_idx [T, K].

    Raises:
        DispatchError: ids outside -1..E-1.
    """
    shards.check(topk_idx)
    owners = shards.owners(topk_idx)
    # Column 0 collects the choices that are none.
    wanted = owners.new_zeros((owners.shape[0], shards.ranks + 1), dtype=torch.bool)
    in_rank = wanted.scatter_(1, owners + 1, True)[:, 1:]
    chosen = topk_idx[topk_idx >= 0].long()
    per_node = None
    if shards.ranks > ranks_per_node:
        per_node = in_rank.unflatten(1, (-1, ranks_per_node)).any(dim=2).sum(dim=0).int()
    return Layout(
        tokens_per_rank=in_rank.sum(dim=0).int(),
        tokens_per_node=per_node,
        tokens_per_expert=torch.bincount(chosen, minlength=shards.experts).int(),
        in_rank=in_rank,
    )


@dataclass(frozen=True)
class Copies:
    """Copies of tokens in the order they are sent.

    rows: [S] int64, token of each copy; ascending within a destination
    choices: [S] int64, column of topk_idx that made the copy (low latency), or None (normal)
    per_rank: [R] copies to each rank
    per_expert: [E] int64, copies for each expert
    """

    rows: Tensor
    choices: Tensor | None
    per_rank: list[int]
    per_expert: Tensor

    def destinations(self) -> Tensor:
        """[S] int64, rank that each copy goes to."""
        counts = torch.tensor(self.per_rank, device=self.rows.device)
        return torch.arange(len(self.per_rank), device=self.rows.device).repeat_interleave(counts)


def normal_copies(in_rank: Tensor, tokens_per_expert: Tensor) -> Copies:
    """One copy per destination rank.

    in_rank [T, R] bool, tokens_per_expert [E] -> copies by destination rank, then token.
    """
    destinations, rows = in_rank.T.nonzero(as_tuple=True)
    per_rank = torch.bincount(destinations, minlength=in_rank.shape[1]).tolist()
    return Copies(rows, None, per_rank, tokens_per_expert.long())


def low_latency_copies(topk_idx: Tensor, shards: ExpertShards, most: int) -> Copies:
    """One copy per choice, topk_idx [T, K] -> copies by expert (and so by rank), then token.

    Raises:
        DispatchError: ids outside -1..E-1, or more than `most` (M) copies for one expert.
    """
    shards.check(topk_idx)
    rows, choices = (topk_idx >= 0).nonzero(as_tuple=True)
    experts = topk_idx[rows, choices].long()
    order = torch.argsort(experts, stable=True)
    per_expert = torch.bincount(experts, minlength=shards.experts)
    if per_expert.max() > most:
        raise DispatchError(
            "topk_idx",
            expected=f"an expert chosen at most {most} times, the slots it has for one rank",
            found=f"expert {int(per_expert.argmax())} chosen {int(per_expert.max())} times",
            remedy="Name an expert once in a row, or send fewer rows at a time.",
        )
    per_rank = per_expert.view(shards.ranks, shards.per_rank).sum(dim=1).tolist()
    return Copies(rows[order], choices[order], per_rank, per_expert)


def low_latency_slots(arrived: Tensor, slots_per_expert: int) -> Tensor:
    """Where each arriving copy of low-latency mode is put.

    An expert's slots fill from 0, source rank by source rank, so the first `arrived.sum(0)[e]` of
    its slots hold tokens and the rest nothing.

    Args:
        arrived: [R, E/R] int64, copies from each source rank for each local expert. Copies arrive
            by source, then local expert, then token; at most M each.
        slots_per_expert: M * R.

    Returns:
        [N] int64, index into the flattened [E/R * slots_per_expert].
    """
    first = torch.arange(arrived.shape[1], device=arrived.device) * slots_per_expert
    starts = (arrived.cumsum(dim=0) - arrived + first).flatten()
    counts = arrived.flatten()
    within = torch.arange(int(counts.sum()), device=arrived.device)
    within = within - (counts.cumsum(dim=0) - counts).repeat_interleave(counts)
    return starts.repeat_interleave(counts) + within


def sum_copies(back: Tensor, copies: Copies, tokens: int, topk_weights: Tensor | None) -> Tensor:
    """Returned copies added up per token, in the order of `copies`.

    Args:
        back: [S, H], in the order of `copies`.
        tokens: T.
        topk_weights: None for the plain sum (normal), [T, K] for the weighted sum (low latency).

    Returns:
        [T, H] float32 (float64 for float64); a token without copies is 0.
    """
    accumulate = torch.promote_types(back.dtype, torch.float32)
    terms = back.to(accumulate)
    if topk_weights is not None:
        terms = terms * topk_weights[copies.rows, copies.choices].to(accumulate)[:, None]
    return terms.new_zeros((tokens, back.shape[1])).index_add_(0, copies.rows, terms)


def aligned(count: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `count`."""
    return -(-count // alignment) * alignment
