"""The seeded-sampling hash of the `sgl_kernel` stand-in against MurmurHash3 on Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.srt.sgl_kernel_torch.hashing import murmur_hash32_cpu

WORD = 0xFFFFFFFF


def rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & WORD


def murmur3_x86_32(words: list[int]) -> int:
    state = 0
    for word in words:
        word = rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) & WORD
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    start=st.integers(0, 2**33),
    columns=st.lists(st.integers(0, 2**31 - 1), max_size=5),
)
@settings(deadline=None)
def test_hash_equals_murmur3(seeds: list[int], start: int, columns: list[int]) -> None:
    positions = [start + 3 * i for i in range(len(seeds))]
    hashed = murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64),
        torch.tensor(positions),
        torch.tensor(columns, dtype=torch.int64),
    )
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == [
        [murmur3_x86_32([s & WORD, s >> 32, p & WORD, c]) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_row_of_a_whole_vocabulary_equals_its_columns(dtype: torch.dtype) -> None:
    seed = torch.tensor([42, 2**63 - 1]).to(dtype)
    positions = torch.tensor([0, 123]).to(dtype)
    whole = murmur_hash32_cpu(seed, positions, torch.arange(50_257))
    for column in (0, 1, 31, 50_256):
        single = murmur_hash32_cpu(seed, positions, torch.tensor([column]))
        assert whole[:, column].tolist() == single[:, 0].tolist()


def test_inputs_are_left_alone() -> None:
    seed, positions, columns = torch.tensor([5, 6]), torch.tensor([7, 8]), torch.arange(3)
    murmur_hash32_cpu(seed, positions, columns)
    assert (seed.tolist(), positions.tolist(), columns.tolist()) == ([5, 6], [7, 8], [0, 1, 2])
