"""Which rows read which pool slots in one forward, grouped into batched calls.

A plan is built once per forward and shared by all layers. Layers may differ in their window, so
the grouping is derived per window on first use and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from sglang_ext.kernels.attention.masks import BandKey, BandMasks


@dataclass(frozen=True)
class PlanCosts:
    """What decides the grouping, in units of one key row read by one query row.

    call: fixed cost of one batched call.
    gather: cost of copying a key row out of the pool (K and V).
    row: cost of each further query row on a key row.
    max_gather: most key rows that one call over several requests may copy, and
    max_mask: most elements of the mask it may need: bounds on memory.

    The defaults were measured on two AVX-512 cores with 3 key heads of 64 in bf16, where one
    unit is about 0.05 us.
    """

    call: float = 350.0
    gather: float = 0.5
    row: float = 0.15
    max_gather: int = 1 << 17
    max_mask: int = 1 << 22

    def of(self, requests: int, rows: int, keys: int, *, copied: bool) -> float:
        """Cost of one call of `requests` x `rows` query rows over `keys` key rows."""
        per_key = 1.0 + self.row * (rows - 1) + (self.gather if copied else 0.0)
        return self.call + requests * keys * per_key

    def alone(self, span: KeySpan) -> float:
        """Cost of a call for one request; a prefill from nothing skips half of its square."""
        cost = self.of(1, span.rows, span.keys, copied=not span.view)
        if span.rows == span.keys:
            cost -= span.keys * self.row * (span.rows - 1) / 2
        return cost


@dataclass(frozen=True)
class KeySpan:
    """The keys one request needs under one window: the last `keys` of its positions.

    view: True when their slots are consecutive, so that the pool can be read in place.
    """

    request: int
    rows: int
    keys: int
    view: bool


@dataclass(frozen=True)
class BlockMask:
    """Visibility of a block of query rows.

    mask: additive; None when every row sees all of `seen`, [rows * repeat, seen keys] when all
        requests share it, otherwise [requests, 1, rows * repeat or 1, seen keys].
    seen: the keys of the group that any row of the block can see.
    """

    mask: torch.Tensor | None
    seen: slice


@dataclass(frozen=True)
class AttentionGroup:
    """Requests answered by one batched call; keys and rows are aligned to the END.

    slots: slice of the pool (one request, no copy) or int64 [requests * keys], padding repeated
        from the request's own slots so that no foreign value is ever read.
    queries: slice or int64 [requests * rows] of the flat query rows.
    scatter: None when the output rows are `queries` in order; otherwise (destination [t],
        source [t]), int64, of the real rows.
    key_pad: None or int64 [requests], how many leading keys are padding.
    tree: None or bool [requests, rows, rows], visibility among the last `rows` keys.
    """

    requests: int
    rows: int
    keys: int
    slots: slice | torch.Tensor
    queries: slice | torch.Tensor
    scatter: tuple[torch.Tensor, torch.Tensor] | None
    key_pad: torch.Tensor | None
    tree: torch.Tensor | None
    masks: BandMasks
    stride: int = 1
    _memo: dict[tuple[BandKey, int, int], BlockMask] = field(default_factory=dict)

    def covers(self, rows: int) -> bool:
        """Whether the group is exactly the first `rows` query rows in order."""
        return isinstance(self.queries, slice) and self.queries == slice(0, rows)

    def block(self, key: BandKey, start: int, stop: int) -> BlockMask:
        """Mask and visible keys of rows `start`..`stop`, remembered for the other layers."""
        found = self._memo.get((key, start, stop))
        if found is None:
            found = self._memo[(key, start, stop)] = self._build_block(key, start, stop)
        return found

    def _build_block(self, key: BandKey, start: int, stop: int) -> BlockMask:
        key = replace(key, stride=self.stride)
        first, last = (start, stop) if self.tree is None else (0, self.rows)
        end = self._position(last - 1) + 1 if key.causal else self.keys
        begin = 0 if key.window < 0 else max(0, self._position(first) - key.window)
        mask = self._visible(key, start, stop, begin, end)
        if self.key_pad is not None:
            column = torch.arange(begin, end, device=key.device)
            padded = (column < self.key_pad[:, None])[:, None, None, :]
            if mask is None:
                mask = torch.zeros(1, end - begin, dtype=key.dtype, device=key.device)
            shape = (self.requests, 1, *mask.shape[-2:])
            mask = mask.expand(shape).masked_fill(padded, float("-inf"))
        return BlockMask(mask, slice(begin, end))

    def _position(self, row: int) -> int:
        """Where a row stands among the group's keys."""
        return self.keys - 1 - (self.rows - 1 - row) * self.stride

    def _visible(
        self, key: BandKey, start: int, stop: int, begin: int, end: int
    ) -> torch.Tensor | None:
        """Mask without the padding: [rows * repeat, keys], per request for a tree, or None."""
        if key.causal and self.tree is not None:
            first, last = start * key.repeat, stop * key.repeat
            return self._tree_mask(key, self.tree)[:, :, first:last, begin:end]
        own = self._position(stop - 1) + 1
        # A band is needed where some row must not see some key of the block.
        if not (key.causal and stop - start > 1) and not (
            key.window >= 0 and own - begin > key.window + 1
        ):
            return None
        band = self.masks.get(key, stop - start, own)[:, begin:]
        return band if end == own else F.pad(band, (0, end - own))

    def _tree_mask(self, key: BandKey, tree: torch.Tensor) -> torch.Tensor:
        """Mask of a draft tree: a node sees the cached prefix and its own ancestors.

        A node's position is the prefix length plus its depth, which bounds its window.
        """
        prefix = self.keys - self.rows
        hidden = torch.zeros(
            self.requests, self.rows, self.keys, dtype=torch.bool, device=key.device
        )
        hidden[:, :, prefix:] = ~tree
        if key.window >= 0:
            position = prefix + tree.sum(-1) - 1
            column = torch.arange(self.keys, device=key.device)
            hidden |= (column < position[:, :, None] - key.window) & (column < prefix)
        mask = torch.zeros(hidden.shape, dtype=key.dtype, device=key.device)
        mask = mask.masked_fill_(hidden, float("-inf")).repeat_interleave(key.repeat, 1)
        return mask[:, None]


@dataclass(frozen=True)
class AttentionPlan:
    """Gather indices and lengths of one forward.

    slots: int64 [requests, positions], pool slot of each position; only the first `keys[r]` of
        row r are read.
    keys: keys of each request including its own new rows; 0 leaves its rows at zero (padding).
    rows: query rows of each request, in the order of the flat query tensor; the last row stands
        at position keys - 1.
    tree: None or bool [requests, width, width]: rows[r] == width for all r and a row sees the
        prefix and the marked ones of the last `width` positions.
    stride: positions from one row of a request to its next: 1, or the number of ranks that deal
        the rows out among themselves.
    """

    slots: torch.Tensor
    keys: tuple[int, ...]
    rows: tuple[int, ...]
    tree: torch.Tensor | None
    masks: BandMasks
    costs: PlanCosts
    stride: int = 1
    _groups: dict[int, tuple[AttentionGroup, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        slots: torch.Tensor,
        keys: Sequence[int],
        rows: Sequence[int],
        *,
        masks: BandMasks,
        tree: torch.Tensor | None = None,
        costs: PlanCosts | None = None,
        stride: int = 1,
    ) -> AttentionPlan:
        """Check and keep the lengths; see the class for shapes.

        Raises:
            ValueError: lengths that contradict each other, naming the request.
        """
        _check_lengths(slots, keys, rows, tree, stride)
        costs = costs or PlanCosts()
        return cls(slots, tuple(keys), tuple(rows), tree, masks, costs, stride)

    def with_slots(self, translate: Callable[[torch.Tensor], torch.Tensor]) -> AttentionPlan:
        """The same plan over another pool, whose slots `translate` gives."""
        return AttentionPlan(
            translate(self.slots),
            self.keys,
            self.rows,
            self.tree,
            self.masks,
            self.costs,
            self.stride,
        )

    @property
    def total_rows(self) -> int:
        """Query rows that the plan accounts for, padding requests included."""
        return sum(self.rows)

    def groups(self, window: int) -> tuple[AttentionGroup, ...]:
        """The batched calls for layers with this window (-1 for none)."""
        if window not in self._groups:
            self._groups[window] = self._build_groups(window)
        return self._groups[window]

    def _build_groups(self, window: int) -> tuple[AttentionGroup, ...]:
        consecutive = self._consecutive_tail()
        spans = []
        for request, (keys, rows) in enumerate(zip(self.keys, self.rows, strict=True)):
            if not keys or not rows:
                continue
            reach = (rows - 1) * self.stride + 1
            needed = keys if window < 0 else min(keys, reach + window)
            spans.append(KeySpan(request, rows, needed, needed <= consecutive[request]))
        members = _partition(spans, self.costs)
        starts = [0, *accumulate(self.rows)]
        return tuple(self._make_group(m, starts) for m in members)

    def _consecutive_tail(self) -> list[int]:
        """How many of each request's last positions lie in consecutive slots."""
        length = torch.tensor(self.keys, device=self.slots.device)[:, None]
        column = torch.arange(1, self.slots.shape[1], device=self.slots.device)
        broken = (self.slots[:, 1:] - self.slots[:, :-1] != 1) & (column < length)
        if not broken.shape[1]:
            return list(self.keys)
        last_break = (broken * column).amax(1)
        return (length[:, 0] - last_break).tolist()

    def _make_group(self, members: list[KeySpan], starts: list[int]) -> AttentionGroup:
        if len(members) == 1:
            return self._lone_group(members[0], starts[members[0].request])
        rows = max(s.rows for s in members)
        keys = max(s.keys for s in members)
        span = torch.tensor(
            [[s.request, s.rows, s.keys, starts[s.request], self.keys[s.request]] for s in members]
        ).to(self.slots.device)
        request, _, needed, _, length = span.unbind(1)
        first = (length - needed)[:, None]
        column = torch.arange(keys, device=span.device)
        column = torch.maximum(first + column - (keys - needed[:, None]), first)
        queries, scatter = _query_map(members, starts, rows, span)
        return AttentionGroup(
            requests=len(members),
            rows=rows,
            keys=keys,
            slots=self.slots[request[:, None], column].reshape(-1),
            queries=queries,
            scatter=scatter,
            key_pad=keys - needed if any(s.keys < keys for s in members) else None,
            tree=None if self.tree is None else self.tree[request],
            masks=self.masks,
            stride=self.stride,
        )

    def _lone_group(self, span: KeySpan, start: int) -> AttentionGroup:
        """One request: nothing is padded, and consecutive slots are read in place."""
        stop = self.keys[span.request]
        own = self.slots[span.request, stop - span.keys : stop]
        begin = int(own[0]) if span.view else 0
        return AttentionGroup(
            requests=1,
            rows=span.rows,
            keys=span.keys,
            slots=slice(begin, begin + span.keys) if span.view else own,
            queries=slice(start, start + span.rows),
            scatter=None,
            key_pad=None,
            tree=None if self.tree is None else self.tree[span.request : span.request + 1],
            masks=self.masks,
            stride=self.stride,
        )


def _query_map(
    members: list[KeySpan], starts: list[int], rows: int, span: torch.Tensor
) -> tuple[slice | torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Query rows of a group and where its output rows go; see `AttentionGroup`."""
    first = starts[members[0].request]
    follows = all(
        starts[s.request] == first + i * rows and s.rows == rows for i, s in enumerate(members)
    )
    if follows:
        return slice(first, first + len(members) * rows), None
    _, real, _, start, _ = span.unbind(1)
    offset = torch.arange(rows, device=span.device) - (rows - real[:, None])
    valid = offset >= 0
    queries = start[:, None] + offset.clamp(min=0)
    source = valid.reshape(-1).nonzero()[:, 0]
    queries = queries.reshape(-1)
    return queries, (queries[source], source)


def _partition(spans: list[KeySpan], costs: PlanCosts) -> list[list[KeySpan]]:
    """Split requests into calls so that neither padding nor the number of calls dominates.

    Requests are taken from the largest to the smallest; each joins the open call or starts the
    next, whichever costs less. Members keep their order in the batch.
    """
    members: list[list[KeySpan]] = []
    price = 0.0
    for span in sorted(spans, key=lambda s: (-s.rows, -s.keys)):
        alone = costs.alone(span)
        if members:
            group = members[-1]
            rows, keys = group[0].rows, max(span.keys, *(s.keys for s in group))
            joined = costs.of(len(group) + 1, rows, keys, copied=True)
            copied = (len(group) + 1) * keys
            fits = copied <= costs.max_gather and copied * rows <= costs.max_mask
            if fits and joined - price < alone:
                group.append(span)
                price = joined
                continue
        members.append([span])
        price = alone
    return [sorted(group, key=lambda s: s.request) for group in members]


def _check_lengths(
    slots: torch.Tensor,
    keys: Sequence[int],
    rows: Sequence[int],
    tree: torch.Tensor | None,
    stride: int,
) -> None:
    if slots.dim() != 2 or slots.shape[0] != len(keys) or len(keys) != len(rows):
        raise ValueError(
            f"slots, keys, rows: expected slots [requests, positions] with one length and one row "
            f"count per request, found slots {list(slots.shape)}, {len(keys)} lengths and "
            f"{len(rows)} row counts"
        )
    for request, (k, r) in enumerate(zip(keys, rows, strict=True)):
        reach = (r - 1) * stride + 1 if r else 0
        if k and not 0 <= reach <= k <= slots.shape[1]:
            raise ValueError(
                f"keys[{request}]: expected rows <= keys <= {slots.shape[1]} positions of `slots`, "
                f"found {r} rows (stride {stride}) and {k} keys"
            )
    if tree is not None and stride != 1:
        raise ValueError(f"tree: expected stride 1 beside a draft tree, found {stride}")
    if tree is not None and any(r != tree.shape[1] for r in rows):
        raise ValueError(
            f"tree: expected every request to have {tree.shape[1]} rows, found {list(rows)}"
        )
