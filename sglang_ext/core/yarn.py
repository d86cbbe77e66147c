"""Rotation frequencies, plain and stretched by YaRN.

Source: YaRN (Peng et al., 2023), "NTK-by-parts": pairs that turn more than `beta_fast` times over
the original length keep their frequency, those that turn less than `beta_slow` times get it
divided by the factor, the ones between are blended linearly. DeepSeek-V4 leaves out YaRN's factor
on the attention logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """How far a rotation is stretched.

    factor: new length over `original_length`. beta_fast, beta_slow: turns over the original
    length beyond which a pair is kept, and below which it is fully stretched.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def frequencies(rope: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """[rope / 2] float32 angles per position: theta^(-2 i / rope), stretched where asked."""
    base = theta ** (torch.arange(0, rope, 2, dtype=torch.float32) / rope)
    plain = 1.0 / base
    if yarn is None:
        return plain
    low, high = (_pair_with(turns, rope, theta, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
    first, last = max(math.floor(low), 0), min(math.ceil(high), rope - 1)
    # Equal bounds would divide by zero.
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rope // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return stretched / (yarn.factor * base) + (1 - stretched) * plain


def _pair_with(turns: float, rope: int, theta: float, yarn: Yarn) -> float:
    """Number of the pair, as a real number, that turns this often over the original length."""
    return rope * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def angles(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [tokens, rope / 2] float32, at `positions` [tokens]."""
    turned = positions.unsqueeze(-1).float() * frequency
    return turned.cos(), turned.sin()
