"""Prompts that the tests send: ragged, repeating, with identifiers to copy."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.e2e.client import Client, Reply, greedy


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` byte tokens."""
    return random.Random(seed).choices(range(256), k=length)


def identifier_prompt(seed: int) -> list[int]:
    """A prompt full of near-identical identifiers, as in reports of characters copied wrong."""
    rng = random.Random(seed)
    names = [f"id_{rng.getrandbits(32):08x}" for _ in range(4)]
    return list(f"Repeat exactly: {' '.join(names)}\n{names[0]} {names[1]}".encode())


def ragged(count: int, seed: int, longest: int = 70) -> list[list[int]]:
    """`count` prompts of 1 to `longest` tokens, every third of them identifiers."""
    rng = random.Random(seed)
    return [
        identifier_prompt(seed + i)
        if i % 3 == 2
        else random_prompt(rng.randint(1, longest), seed + i)
        for i in range(count)
    ]


# Prime and odd sizes, alone and together.
BATCHES: tuple[tuple[int, int], ...] = ((1, 100), (2, 200), (5, 300), (16, 400))


def run_batches(client: Client, tokens: int = 33, **params: object) -> list[list[Reply]]:
    """Every batch of the standard workload, greedy; lengths differ inside a batch."""
    return [
        client.batch(ragged(count, seed), lengths(count, tokens, **params))
        for count, seed in BATCHES
    ]


def lengths(count: int, tokens: int, **params: object) -> list[dict[str, object]]:
    return [greedy(tokens - 2 * (i % 5), **params) for i in range(count)]


def ids_of(batches: Sequence[Sequence[Reply]]) -> list[list[list[int]]]:
    return [[reply.ids for reply in batch] for batch in batches]


def accepted(batches: Sequence[Sequence[Reply]]) -> list[int]:
    """Rounds that accepted 0, 1, 2, ... drafts, over all replies."""
    rows = [reply.accepted for batch in batches for reply in batch]
    width = max(map(len, rows), default=0)
    return [sum(row[n] if n < len(row) else 0 for row in rows) for n in range(width)]
