"""Additive masks of a band of visible keys, shared by every request, layer and forward.

A mask aligned to the LAST key depends only on how far a query row stands from the end. One
template per (rows, window) therefore serves every request: a request with fewer keys or rows
takes a corner of it, and nothing is built per forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_ROW_TIERS = (8, 32, 256)
_MIN_KEYS = 512
_MAX_TEMPLATES = 32


@dataclass(frozen=True)
class BandKey:
    """What a template is built for.

    causal: whether a row stops at its own position.
    window: how many keys before its own position a row sees; -1 for all.
    repeat: how often each row is repeated (the query heads that share a key head).
    stride: positions from one row to the next; the last row stands at the last key.
    """

    causal: bool
    window: int
    repeat: int
    dtype: torch.dtype
    device: torch.device
    stride: int = 1


@dataclass
class BandMasks:
    """Cache of templates; the least recently made is dropped when it is full."""

    _templates: dict[tuple[BandKey, int], torch.Tensor] = field(default_factory=dict)

    def get(self, key: BandKey, rows: int, keys: int) -> torch.Tensor:
        """Mask for `rows` rows, the last of which stands at the last of `keys` positions.

        Returns:
            [rows * repeat, keys], 0 where visible and -inf elsewhere; a view of the template.
        """
        tier = next((t for t in _ROW_TIERS if t >= rows), rows)
        template = self._templates.get((key, tier))
        if template is None or template.shape[1] < keys:
            template = self._grow(key, tier, keys)
        return template[(tier - rows) * key.repeat :, template.shape[1] - keys :]

    def _grow(self, key: BandKey, tier: int, keys: int) -> torch.Tensor:
        if len(self._templates) >= _MAX_TEMPLATES:
            self._templates.pop(next(iter(self._templates)))
        width = max(_MIN_KEYS, tier, 1 << (keys - 1).bit_length())
        self._templates[(key, tier)] = template = band_mask(key, tier, width)
        return template


def band_mask(key: BandKey, rows: int, keys: int) -> torch.Tensor:
    """Build one template.

    Returns:
        [rows * repeat, keys], dtype and device of `key`.
    """
    row = keys - 1 - key.stride * torch.arange(rows - 1, -1, -1, device=key.device)[:, None]
    column = torch.arange(keys, device=key.device)[None, :]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=key.device)
    if key.causal:
        hidden |= column > row
    if key.window >= 0:
        hidden |= column < row - key.window
    mask = torch.zeros(rows, keys, dtype=key.dtype, device=key.device)
    return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(key.repeat, 0)
