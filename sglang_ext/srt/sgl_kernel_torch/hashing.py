"""The 32-bit MurmurHash3 of (seed, position, column) behind SGLang's seeded sampling.

Words are kept in int32: products and left shifts wrap as the hash wants, and right shifts are
masked because int32 shifts carry the sign.
"""

from __future__ import annotations

import torch

_BYTES_HASHED = 16


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_C1 = _signed(0xCC9E2D51)
_C2 = _signed(0x1B873593)
_ADD = _signed(0xE6546B64)
_FINAL_1 = _signed(0x85EBCA6B)
_FINAL_2 = _signed(0xC2B2AE35)


def _low_word(values: torch.Tensor) -> torch.Tensor:
    wide = values.view(torch.int64) if values.dtype == torch.uint64 else values.to(torch.int64)
    return wide.to(torch.int32)


def _high_word(values: torch.Tensor) -> torch.Tensor:
    wide = values.view(torch.int64) if values.dtype == torch.uint64 else values.to(torch.int64)
    return (wide >> 32).to(torch.int32)


def _rotate_left_(words: torch.Tensor, bits: int) -> torch.Tensor:
    carried = (words >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    return words.bitwise_left_shift_(bits).bitwise_or_(carried)


def _scramble(words: torch.Tensor) -> torch.Tensor:
    return _rotate_left_(words * _C1, 15).mul_(_C2)


def _mix_(state: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return _rotate_left_(state.bitwise_xor_(words), 13).mul_(5).add_(_ADD)


def _fold_(state: torch.Tensor, bits: int) -> torch.Tensor:
    return state.bitwise_xor_((state >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def murmur_hash32_cpu(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3_x86_32, start value 0, over the words seed-low, seed-high, position, column.

    Args:
        seed: [rows] uint64 or int64.
        positions: [rows] int; the low 32 bits count.
        col_indices: [columns] int; the low 32 bits count.

    Returns:
        [rows, columns] uint32.
    """
    rows = torch.zeros(seed.shape, dtype=torch.int32, device=seed.device)
    for word in (_low_word(seed), _high_word(seed), _low_word(positions)):
        _mix_(rows, _scramble(word))
    columns = _scramble(_low_word(col_indices))
    state = rows.unsqueeze(1).repeat(1, columns.numel())
    _mix_(state, columns).bitwise_xor_(_BYTES_HASHED)
    _fold_(state, 16).mul_(_FINAL_1)
    _fold_(state, 13).mul_(_FINAL_2)
    return _fold_(state, 16).view(torch.uint32)
