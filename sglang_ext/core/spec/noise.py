"""Gumbel noise keyed by (seed, position, column): the noise of SGLang's seeded sampler.

The same key gives the same number in every batch, at every draft length and on every rank, so a
seeded request draws the same text with and without speculation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_KEY_BYTES = 16
_LARGEST_LOG = -(2.0**-32)


class NoiseColumns:
    """Token ids that key a row's noise, with the part of the hash that depends on them alone.

    ids: [m] int64, shared by all rows, or [n, m], one list per row
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.words = _scramble(ids.to(torch.int32))

    def __len__(self) -> int:
        return self.ids.shape[-1]


@lru_cache(maxsize=8)
def vocabulary_columns(size: int, device: torch.device) -> NoiseColumns:
    """Columns 0 .. size-1, hashed once."""
    return NoiseColumns(torch.arange(size, device=device))


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: NoiseColumns) -> Tensor:
    """MurmurHash3 (32 bit, start value 0) of the words seed_low, seed_high, position, column.

    seeds: [n] int64, positions: [n] int64, columns: m ids
    returns [n, m] int32, the bits of the unsigned hash
    """
    # Signed 32-bit arithmetic wraps as unsigned does; only right shifts need a mask.
    keys = zip(seeds.tolist(), positions.tolist(), strict=True)
    rows = [_row_state(seed, position) for seed, position in keys]
    h = torch.tensor(rows, dtype=torch.int32, device=columns.words.device)[:, None] ^ columns.words
    h = _rotate(h, 13).mul_(5).add_(_signed(0xE6546B64)).bitwise_xor_(_KEY_BYTES)
    h = _fold(h, 16).mul_(_signed(0x85EBCA6B))
    h = _fold(h, 13).mul_(_signed(0xC2B2AE35))
    return _fold(h, 16)


def gumbel(seeds: Tensor, positions: Tensor, columns: NoiseColumns) -> Tensor:
    """-log(-log(u)) with u the hash scaled to [0, 1].

    seeds: [n] int64, positions: [n] int64, columns: m ids  ->  [n, m] fp64, always finite
    """
    hashed = murmur_hash32(seeds, positions, columns)
    u = hashed.view(torch.uint32).to(torch.float64).div_(_WORD)
    u.log_().clamp_(min=torch.finfo(torch.float64).min, max=_LARGEST_LOG)
    return u.neg_().log_().neg_()


def _scramble(word: Tensor) -> Tensor:
    return _rotate(word * _signed(0xCC9E2D51), 15).mul_(_signed(0x1B873593))


def _rotate(word: Tensor, by: int) -> Tensor:
    low = (word >> (32 - by)).bitwise_and_((1 << by) - 1)
    return (word << by).bitwise_or_(low)


def _fold(word: Tensor, by: int) -> Tensor:
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1).bitwise_xor_(word)


def _row_state(seed: int, position: int) -> int:
    """Hash state after the seed and the position, as a signed 32-bit integer."""
    h = 0
    for word in (seed & _WORD, (seed >> 32) & _WORD, position & _WORD):
        k = word * 0xCC9E2D51 & _WORD
        k = (k << 15 | k >> 17) & _WORD
        h ^= k * 0x1B873593 & _WORD
        h = (h << 13 | h >> 19) & _WORD
        h = (h * 5 + 0xE6546B64) & _WORD
    return _signed(h)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
