"""DeepSeek-V4's view of a forward: per piece of rows, which slots hold what.

Everything here follows from positions and `req_to_token`; no mode, no request state. A piece is a
`RowGroup` of bounded height, so that what is gathered per row stays bounded however long a prompt
is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sglang_ext.core.compress import block_positions, closes_block
from sglang_ext.srt.attention.dsa_plan import RowGroup, Span, group

# Rows of one request that are computed together.
PIECE_ROWS = 256


@dataclass(frozen=True)
class Blocks:
    """Blocks that end in this forward, in any order.

    members: [blocks, rows] int64 slots that pool, -1 for none; see `core.compress`.
    last: [blocks] int64 slot of the last token. first: [blocks] int64 position of the first.
    """

    members: Tensor
    last: Tensor
    first: Tensor


@dataclass(frozen=True)
class Piece:
    """Rows of one or more requests, [requests, width], padded with rows that see nothing.

    group: rows, tokens visible to them, slots by position.
    """

    group: RowGroup
    window: int

    @cached_property
    def real(self) -> Tensor:
        """[requests, width] bool, rows that are not padding."""
        return self.group.visible > 0

    @cached_property
    def positions(self) -> Tensor:
        """[requests, width] int64; -1 where padded."""
        return self.group.visible - 1

    @cached_property
    def window_slots(self) -> Tensor:
        """[requests, width, window] int64, oldest first, -1 before the request's first token."""
        back = torch.arange(self.window - 1, -1, -1, device=self.group.rows.device)
        at = self.positions.unsqueeze(-1) - back
        slots = self.group.slots.gather(1, at.clamp(min=0).flatten(1)).view_as(at)
        return slots.masked_fill(at < 0, -1)

    @cached_property
    def real_window_slots(self) -> Tensor:
        """[real rows, window] int64: `window_slots` without padding."""
        return self.window_slots[self.real]

    def block_slots(self, ratio: int) -> Tensor:
        """[requests, entries] int64 slot of every block's last token; beyond the end, any."""
        return self.group.slots[:, ratio - 1 :: ratio]

    def ending_blocks(self, ratio: int) -> Blocks:
        """Blocks whose last token is among the rows."""
        ends = closes_block(self.positions, ratio) & self.real
        request, column = ends.nonzero(as_tuple=True)
        last = self.positions[request, column]
        at = block_positions(last, ratio)
        slots = self.group.slots[request.unsqueeze(1), at.clamp(min=0)]
        return Blocks(
            members=slots.masked_fill(at < 0, -1),
            last=self.group.slots[request, last],
            first=last - ratio + 1,
        )


@dataclass(frozen=True)
class RowMap:
    """All rows of a forward."""

    pieces: tuple[Piece, ...]
    blocks: dict[int, Blocks]


def row_map(
    spans: list[Span],
    req_to_token: Tensor,
    *,
    window: int,
    ratios: tuple[int, ...],
    own: list[Span] | None = None,
) -> RowMap:
    """The map of a forward's requests.

    req_to_token: [request rows, positions] int32. ratios: those that the model's layers have.
    own: the rows whose attention is computed, where that is a part of those that are written.
    """
    written = _pieces(spans, req_to_token, window)
    pieces = written if own is None else _pieces(own, req_to_token, window)
    compressed = [ratio for ratio in ratios if ratio]
    blocks = {ratio: _joined([p.ending_blocks(ratio) for p in written]) for ratio in compressed}
    return RowMap(pieces, blocks if written else {})


def _pieces(spans: list[Span], req_to_token: Tensor, window: int) -> tuple[Piece, ...]:
    groups = (part for whole in group(spans, req_to_token) for part in _cut(whole))
    return tuple(Piece(part, window) for part in groups)


def _cut(whole: RowGroup) -> list[RowGroup]:
    height = whole.rows.shape[1]
    cuts = [slice(start, start + PIECE_ROWS) for start in range(0, height, PIECE_ROWS)]
    return [_part(whole, cut) for cut in cuts]


def _part(whole: RowGroup, cut: slice) -> RowGroup:
    visible = whole.visible[:, cut]
    slots = whole.slots
    if len(visible) == 1:
        # Nothing beyond the last row's own token is looked at.
        slots = slots[:, : int(visible.max())]
    first = None if whole.first is None else whole.first + (cut.start or 0)
    return RowGroup(rows=whole.rows[:, cut], visible=visible, slots=slots, first=first)


def _joined(parts: list[Blocks]) -> Blocks:
    if not parts:
        none = torch.empty(0, dtype=torch.int64)
        return Blocks(none, none, none)
    return Blocks(
        members=torch.cat([p.members for p in parts]),
        last=torch.cat([p.last for p in parts]),
        first=torch.cat([p.first for p in parts]),
    )
