"""Context parallelism: which rank computes which token of a prompt, and the ring that joins them.

n tokens are split over R ranks. Causal attention makes token t cost t + 1 key products, so equal
lengths are not equal work:

    contiguous  rank r takes one run of n / R tokens: the last rank does about 2 - 1/R of the mean
    zigzag      2R consecutive blocks, rank r takes blocks r and 2R - 1 - r (SGLang; Llama 3, 2024)
    interleave  token t of the concatenated batch goes to rank t mod R (SGLang)
    striped     as interleave, within each request; the ring masks causally in every step, strictly
                where the keys come from a higher rank (Brandon et al., 2023)

All indices are int64 on the CPU; the plan of a batch is made once and used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Strategy = Literal["contiguous", "zigzag", "interleave", "striped"]


@dataclass(frozen=True)
class Split:
    """Tokens of each rank, in the order in which the rank holds them.

    ranks: [R] of [n_r] int64, indices into the concatenated batch; together every token once
    """

    ranks: tuple[Tensor, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.ranks]

    def gather_order(self) -> Tensor:
        """[n] int64: rows[gather_order()] puts the concatenation of all ranks in token order."""
        held = torch.cat(self.ranks)
        inverse = torch.empty_like(held)
        inverse[held] = torch.arange(len(held))
        return inverse

    def padded_gather_order(self) -> Tensor:
        """Likewise when every rank's rows were padded to the longest before an all-gather."""
        longest = max(self.lengths)
        places = [r * longest + torch.arange(n) for r, n in enumerate(self.lengths)]
        return torch.cat(places)[self.gather_order()]


def zigzag_block_sizes(n: int, ranks: int) -> list[int]:
    """[2R] sizes of consecutive blocks, floor(n / 2R), the first n mod 2R one longer."""
    base, longer = divmod(n, 2 * ranks)
    return [base + (i < longer) for i in range(2 * ranks)]


def zigzag_block_order(ranks: int) -> list[int]:
    """[2R] blocks as the ranks hold them one after another: 0, 2R-1, 1, 2R-2, ..."""
    return [block for rank in range(ranks) for block in (rank, 2 * ranks - 1 - rank)]


def split(strategy: Strategy, lengths: Sequence[int], ranks: int) -> Split:
    """Tokens of a batch of requests over the ranks.

    A request shorter than 2R tokens leaves zigzag blocks empty: ranks then hold unequal counts,
    still every token once. SGLang runs such a batch without context parallelism; `can_zigzag`.

    Args:
        lengths: [requests] tokens of each, concatenated in this order; may be 0.
        ranks: R, at least 1.
    """
    if ranks < 1 or any(n < 0 for n in lengths):
        raise ValueError(
            f"split: expected ranks >= 1 and lengths >= 0, found {ranks} and {list(lengths)}"
        )
    total = sum(lengths)
    if strategy == "interleave":
        # Slices, because fewer tokens than ranks leave some ranks none.
        return Split(tuple(torch.arange(total)[r::ranks] for r in range(ranks)))
    held: list[list[Tensor]] = [[] for _ in range(ranks)]
    first = 0
    for n in lengths:
        for rank, tokens in enumerate(_one_request(strategy, n, ranks)):
            held[rank].append(first + tokens)
        first += n
    empty = torch.empty(0, dtype=torch.int64)
    return Split(tuple(torch.cat([empty, *tokens]) for tokens in held))


def _one_request(strategy: Strategy, n: int, ranks: int) -> list[Tensor]:
    positions = torch.arange(n)
    if strategy == "striped":
        return [positions[r::ranks] for r in range(ranks)]
    if strategy == "contiguous":
        return list(positions.tensor_split(ranks))
    if strategy != "zigzag":
        raise ValueError(
            f"strategy: expected contiguous, zigzag, interleave or striped, found {strategy!r}"
        )
    blocks = positions.split(zigzag_block_sizes(n, ranks))
    return [torch.cat([blocks[r], blocks[2 * ranks - 1 - r]]) for r in range(ranks)]


def can_zigzag(lengths: Sequence[int], ranks: int) -> bool:
    """Whether every request fills all 2R blocks, which SGLang asks for."""
    return all(n >= 2 * ranks for n in lengths)


def positions_of(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Request and position of each token of a concatenated batch, both [n] int64."""
    counts = torch.tensor(list(lengths), dtype=torch.int64)
    requests = torch.arange(len(counts)).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return requests, torch.arange(int(counts.sum())) - starts[requests]


def causal_work(plan: Split, lengths: Sequence[int]) -> list[int]:
    """[R] key products of each rank when it computes its own queries against all their keys."""
    _, positions = positions_of(lengths)
    return [int((positions[tokens] + 1).sum()) for tokens in plan.ranks]


def ring_work(plan: Split, lengths: Sequence[int]) -> Tensor:
    """[R steps, R ranks] key products of ring attention; in step s rank r holds keys of r - s.

    The ranks wait for each other after every step, so the time is the sum of the steps' maxima.
    """
    ranks = len(plan.ranks)
    requests, positions = positions_of(lengths)
    work = torch.zeros(ranks, ranks, dtype=torch.int64)
    for step in range(ranks):
        for rank in range(ranks):
            visible = _visible(
                requests, positions, plan.ranks[rank], plan.ranks[(rank - step) % ranks]
            )
            work[step, rank] = visible.sum()
    return work


def _visible(requests: Tensor, positions: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """[q, k] bool: same request, and the key not after the query."""
    same = requests[queries][:, None] == requests[keys][None]
    return same & (positions[queries][:, None] >= positions[keys][None])


def partial_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention over some of the keys, in a form that merges exactly.

    Args:
        q: [q, h, d], scaled; k, v: [k, h, d]; visible: [q, k] bool.

    Returns:
        out [q, h, d] and lse [q, h], log of the sum of exp(scores); a query that sees no key has
        out 0 and lse -inf.
    """
    scores = torch.einsum("qhd,khd->qhk", q, k).masked_fill(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.einsum("qhk,khd->qhd", torch.exp(scores - safe[:, :, None]), v), lse


def merge_partial(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    lse = log(e^a + e^b), out = sum of out_i e^(lse_i - lse); the order of merging is of no account.
    """
    (out_a, a), (out_b, b) = first, second
    lse = torch.logaddexp(a, b)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return (
        out_a * torch.exp(a - safe)[:, :, None] + out_b * torch.exp(b - safe)[:, :, None],
        lse,
    )


@dataclass(frozen=True)
class RingStep:
    """One step of a rank: whose keys it holds, and whom it passes them to afterwards.

    keys_of: rank; send_to: next rank of the ring, None after the last step
    """

    keys_of: int
    send_to: int | None


def ring_schedule(rank: int, ranks: int) -> list[RingStep]:
    """[R] steps with R - 1 rotations; keys move from r to r + 1 while a step computes."""
    nxt = (rank + 1) % ranks
    return [RingStep((rank - s) % ranks, nxt if s < ranks - 1 else None) for s in range(ranks)]


def striped_mask(q_tokens: int, k_tokens: int, q_rank: int, k_rank: int) -> Tensor:
    """[q, k] bool of one striped ring step of one request: causal, strict if k_rank > q_rank.

    Query i is token i * R + q_rank and key j token j * R + k_rank, so key j is visible when j < i,
    or j == i and k_rank <= q_rank.
    """
    i, j = torch.arange(q_tokens)[:, None], torch.arange(k_tokens)[None]
    return (j < i) if k_rank > q_rank else (j <= i)
