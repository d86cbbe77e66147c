"""The law a request samples from: temperature, top-k, top-p and min-p in SGLang's order.

SGLang's PyTorch sampler softmaxes the scaled logits, sorts them, then drops every token that is
(1) past rank top_k, (2) preceded by more than top_p of mass of the UNfiltered law, or
(3) below min_p times the largest probability. The three tests are independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sglang_ext.core.spec.noise import NoiseColumns, gumbel, vocabulary_columns
from sglang_ext.core.spec.types import VerifyPlan

TOP_K_ALL = 1 << 30
# Leading tokens sorted for a nucleus, widened until they hold it: a full sort costs far more.
_NUCLEUS_WIDTHS = (256, 4096)
# Rounding room of the test "these tokens hold the nucleus".
_MASS_SLACK = 1e-4


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Sampling parameters, one entry per row of logits.

    A greedy request is written as temperature 1 and top_k 1.
    """

    temperature: tuple[float, ...]
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]
    device: torch.device | str = "cpu"

    @cached_property
    def ranked(self) -> list[int]:
        """Rows whose filters need the tokens in order (top-k or top-p)."""
        pairs = enumerate(zip(self.top_k, self.top_p, strict=True))
        return [i for i, (k, p) in pairs if k < TOP_K_ALL or p < 1.0]

    @cached_property
    def floored(self) -> list[int]:
        """Rows that only a min-p floor filters."""
        ranked = set(self.ranked)
        return [i for i, m in enumerate(self.min_p) if m > 0.0 and i not in ranked]

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """Checks and fills the defaults: no top-k (-1 or TOP_K_ALL), top-p 1, min-p 0."""
        n = len(temperature)
        ks = tuple(TOP_K_ALL if k == -1 else int(k) for k in top_k or [TOP_K_ALL] * n)
        rows = cls(
            tuple(float(t) for t in temperature),
            ks,
            tuple(float(p) for p in top_p or [1.0] * n),
            tuple(float(m) for m in min_p or [0.0] * n),
            device,
        )
        rows._check()
        return rows

    def _check(self) -> None:
        n = len(self.temperature)
        for name, values, ok, expected in (
            ("temperature", self.temperature, lambda x: x > 0, "> 0 (greedy is top_k 1)"),
            ("top_k", self.top_k, lambda x: x >= 1, ">= 1 or -1 for all"),
            ("top_p", self.top_p, lambda x: 0 < x <= 1, "in (0, 1]"),
            ("min_p", self.min_p, lambda x: 0 <= x <= 1, "in [0, 1]"),
        ):
            if len(values) != n or not all(ok(x) for x in values):
                raise ValueError(
                    f"{name}: expected {n} values {expected}, found {list(values)}; "
                    "pass one value per row"
                )

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, rows: Sequence[int]) -> SamplingRows:
        """The parameters of some rows, in that order, repeats allowed."""
        return SamplingRows(
            tuple(self.temperature[i] for i in rows),
            tuple(self.top_k[i] for i in rows),
            tuple(self.top_p[i] for i in rows),
            tuple(self.min_p[i] for i in rows),
            self.device,
        )

    def for_rows(self, plan: VerifyPlan) -> SamplingRows:
        """One entry per request -> one entry per verify row of `plan`."""
        return self.take([r for r, n in enumerate(plan.row_counts) for _ in range(n)])

    def scaled(self, logits: Tensor) -> Tensor:
        """logits / temperature, in fp32; [n, V] -> [n, V]"""
        logits = logits.float()
        if all(t == 1.0 for t in self.temperature):
            return logits
        return logits / self.column("temperature")

    def column(self, name: str) -> Tensor:
        """[n, 1] one parameter as a tensor: fp32, top_k int64."""
        dtype = torch.int64 if name == "top_k" else torch.float32
        return torch.tensor(getattr(self, name), dtype=dtype, device=self.device)[:, None]


def target_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The law p that each row samples from.

    logits: [n, V], penalties, bias and masks already applied  ->  [n, V] fp32, rows sum to 1
    """
    return filtered_probs(torch.softmax(rows.scaled(logits), dim=-1), rows)


def filtered_probs(probs: Tensor, rows: SamplingRows) -> Tensor:
    """Applies top-k, top-p and min-p, and normalises; writes over `probs`.

    probs: [n, V] fp32, rows sum to 1  ->  [n, V] fp32, rows sum to 1
    """
    if rows.floored:
        some = rows.take(rows.floored)
        part = probs[rows.floored]
        part.masked_fill_(part < part.amax(dim=-1, keepdim=True) * some.column("min_p"), 0.0)
        probs[rows.floored] = part.div_(part.sum(dim=-1, keepdim=True))
    if rows.ranked:
        part = probs[rows.ranked]
        some = rows.take(rows.ranked)
        ordered, order = _leading(part, some)
        weights = _ranked_weights(ordered, some)
        weights.div_(weights.sum(dim=-1, keepdim=True))
        probs[rows.ranked] = torch.zeros_like(part).scatter_(1, order, weights)
    return probs


def _leading(probs: Tensor, rows: SamplingRows, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order, as many as the filters can keep and `spare` more.

    probs: [n, V]  ->  ([n, w] probabilities, [n, w] their columns)
    """
    size = probs.shape[-1]
    bounded = [k for k in rows.top_k if k < TOP_K_ALL]
    need = max(bounded, default=0) + spare
    if len(bounded) == len(rows):
        return probs.topk(min(need, size), dim=-1)
    for width in _NUCLEUS_WIDTHS:
        if need <= width < size and _may_hold(rows):
            ordered, order = probs.topk(width, dim=-1)
            if _holds_nucleus(ordered, rows):
                return ordered, order
    return probs.sort(dim=-1, descending=True)


def _may_hold(rows: SamplingRows) -> bool:
    """Whether every row without top-k has a nucleus smaller than everything."""
    pairs = zip(rows.top_k, rows.top_p, strict=True)
    return all(k < TOP_K_ALL or p + _MASS_SLACK < 1.0 for k, p in pairs)


def _holds_nucleus(ordered: Tensor, rows: SamplingRows) -> bool:
    """Whether the tokens beyond the leading ones are all outside top-k or top-p."""
    enough = ordered.sum(dim=-1, keepdim=True) > rows.column("top_p") + _MASS_SLACK
    return bool((enough | (rows.column("top_k") <= ordered.shape[-1])).all())


def _ranked_weights(ordered: Tensor, rows: SamplingRows) -> Tensor:
    """Zeroes what the three filters drop; `ordered` [n, w] descending is written over."""
    ahead = ordered.cumsum(dim=-1).sub_(ordered)
    floor = ordered[:, :1] * rows.column("min_p")
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    dropped = (rank >= rows.column("top_k")) | (ahead > rows.column("top_p")) | (ordered < floor)
    return ordered.masked_fill_(dropped, 0.0)


def draw(weights: Tensor, coins: Tensor) -> Tensor:
    """Inverse-CDF sampling; a column of weight 0 is never drawn, at no coin.

    weights: [n, C] >= 0, rows need not be normalised; coins: [n] in [0, 1)  ->  [n] int64
    """
    # First column whose cumulated weight is strictly above the mark: its own weight is positive.
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    mark = coins.to(torch.float64)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, mark, right=True).clamp_(max=cdf.shape[1] - 1).squeeze(1)


def seeded_sample(
    logits: Tensor,
    rows: SamplingRows,
    seeds: Tensor,
    positions: Tensor,
    columns: Tensor | None = None,
) -> Tensor:
    """The token that SGLang's seeded sampler draws for each row when the row is alone.

    A filtered row keys its noise by rank, an unfiltered one by token id, as SGLang does.

    logits: [n, C]; seeds: [n] int64; positions: [n] int64, position of the row's input token;
    columns: [C] or [n, C] int64, token ids of the columns, None when a column is the id itself
    returns [n] int64, columns
    """
    probs = torch.softmax(rows.scaled(logits), dim=-1)
    size, device = probs.shape[-1], probs.device
    by_id = vocabulary_columns(size, device) if columns is None else NoiseColumns(columns)
    ranked = sorted({*rows.ranked, *rows.floored})
    if not ranked:
        return _draw_by_id(probs, seeds, positions, by_id)
    drawn = _draw_by_rank(probs[ranked], rows.take(ranked), seeds[ranked], positions[ranked])
    if len(ranked) == len(rows):
        return drawn
    at = torch.tensor(ranked, device=device)
    return _draw_by_id(probs, seeds, positions, by_id).index_copy_(0, at, drawn)


def _draw_by_id(probs: Tensor, seeds: Tensor, positions: Tensor, ids: NoiseColumns) -> Tensor:
    return gumbel(seeds, positions, ids).add_(probs.log()).argmax(dim=-1)


def _draw_by_rank(probs: Tensor, rows: SamplingRows, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] columns, the noise keyed by the place in the order of probability."""
    ordered, order = _leading(probs, rows, spare=1)
    weights = _ranked_weights(ordered.clone(), rows)
    if ordered.shape[-1] < probs.shape[-1]:
        # SGLang sorts whole rows. Where a surviving token ties, only that sort knows its rank.
        tied = (ordered[:, :-1] == ordered[:, 1:]) & (weights[:, :-1] > 0)
        if bool(tied.any() | (weights[:, -1] > 0).any()):
            ordered, order = probs.sort(dim=-1, descending=True)
            weights = _ranked_weights(ordered, rows)
    ranks = vocabulary_columns(weights.shape[-1], probs.device)
    scores = gumbel(seeds, positions, ranks).add_(weights.double().log_())
    return order.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
