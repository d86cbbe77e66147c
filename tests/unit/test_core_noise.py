"""The keyed noise against a byte-wise MurmurHash3."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from sglang_ext.core.spec.noise import (
    NoiseColumns,
    gumbel,
    murmur_hash32,
    vocabulary_columns,
)


def murmur3(data: bytes, start: int = 0) -> int:
    """MurmurHash3_x86_32 for inputs of whole 32-bit words."""
    mask, h = 0xFFFFFFFF, start
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_the_oracle_agrees_with_published_vectors() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3(b"\x00\x00\x00\x00") == 0x2362F9DE


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**32 + 5, 2**63 - 1, -1])
def test_hash_equals_the_oracle_for_every_word(seed: int) -> None:
    positions, ids = [0, 1, 977, 2**31 - 1], [0, 1, 2, 151935, 31]
    hashed = murmur_hash32(
        torch.tensor([seed] * 4), torch.tensor(positions), NoiseColumns(torch.tensor(ids))
    )
    expected = [
        [murmur3(struct.pack("<QII", seed & (2**64 - 1), p, c)) for c in ids] for p in positions
    ]
    assert hashed.view(torch.uint32).tolist() == expected


def test_noise_is_the_gumbel_transform_of_the_hash_and_always_finite() -> None:
    columns = vocabulary_columns(4099, torch.device("cpu"))
    seeds, positions = torch.tensor([3, 3]), torch.tensor([10, 11])
    u = murmur_hash32(seeds, positions, columns).view(torch.uint32).double() / 0xFFFFFFFF
    noise = gumbel(seeds, positions, columns)
    assert torch.isfinite(noise).all()
    torch.testing.assert_close(noise, -torch.log(-torch.log(u)))
    assert noise.max() <= 32 * math.log(2) + 1e-9


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    columns = vocabulary_columns(101, torch.device("cpu"))
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    together = gumbel(seeds, positions, columns)
    for r in range(3):
        assert torch.equal(gumbel(seeds[r : r + 1], positions[r : r + 1], columns)[0], together[r])


def test_columns_may_differ_by_row() -> None:
    ids = torch.tensor([[4, 9, 2], [7, 7, 0]])
    seeds, positions = torch.tensor([1, 2]), torch.tensor([5, 6])
    whole = gumbel(seeds, positions, vocabulary_columns(10, torch.device("cpu")))
    assert torch.equal(gumbel(seeds, positions, NoiseColumns(ids)), whole.gather(1, ids))


def test_draws_follow_the_law() -> None:
    logs = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    columns = vocabulary_columns(4, torch.device("cpu"))
    noise = gumbel(torch.full((40_000,), 7), torch.arange(40_000), columns)
    shares = torch.bincount((noise + logs).argmax(dim=-1), minlength=4) / 40_000
    torch.testing.assert_close(shares, logs.exp(), atol=0.01, rtol=0)
