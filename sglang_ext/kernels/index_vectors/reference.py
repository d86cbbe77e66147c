"""Index vectors one at a time, in Python's floats, rounded where the tensor's dtype rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sglang_ext.core.indexer_v32 import LAYER_NORM_EPS, Precision

Rounds = Callable[[float], float]


def index_query_reference(q: Tensor, cos: Tensor, sin: Tensor, precision: Precision) -> Tensor:
    """See `api.index_query`; float32."""
    out = torch.zeros(q.shape)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[t, h] = _finished(q[t, h].tolist(), cos[t], sin[t], precision, q.dtype)
    return out


def index_key_reference(
    k: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, precision: Precision
) -> Tensor:
    """See `api.index_key`; float32."""
    out, rounds = torch.zeros(k.shape), _rounds(k.dtype)
    w, b = weight.tolist(), bias.tolist()
    for t, vector in enumerate(k.tolist()):
        mean = sum(vector) / len(vector)
        spread = sum((v - mean) ** 2 for v in vector) / len(vector)
        root = (spread + LAYER_NORM_EPS) ** -0.5
        normed = [rounds((v - mean) * root * w[i] + b[i]) for i, v in enumerate(vector)]
        out[t] = _finished(normed, cos[t], sin[t], precision, k.dtype)
    return out


def index_query_v4_reference(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `api.index_query_v4`; float32."""
    out, half = q.float().clone(), cos.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            vector = q[t, h].tolist()
            start = len(vector) - 2 * half
            for pair in range(half):
                even, odd = vector[start + 2 * pair], vector[start + 2 * pair + 1]
                c, s = float(cos[t, pair]), float(sin[t, pair])
                out[t, h, start + 2 * pair] = even * c - odd * s
                out[t, h, start + 2 * pair + 1] = odd * c + even * s
    return out


def _rounds(dtype: torch.dtype) -> Rounds:
    return lambda value: float(torch.tensor(value, dtype=dtype))


def _finished(
    vector: list[float], cos: Tensor, sin: Tensor, precision: Precision, dtype: torch.dtype
) -> Tensor:
    turned = _rotated(vector, cos.tolist(), sin.tolist(), _rounds(dtype))
    return torch.tensor(turned if precision is Precision.EXACT else _fp8(_hadamard(turned)))


def _rotated(
    vector: list[float], cos: list[float], sin: list[float], rounds: Rounds
) -> list[float]:
    """Pair i of the leading dims is (vector[i], vector[half + i])."""
    half, out = len(cos), list(vector)
    for i in range(half):
        first, second = vector[i], vector[half + i]
        c, s = rounds(cos[i]), rounds(sin[i])
        out[i] = rounds(rounds(first * c) - rounds(second * s))
        out[half + i] = rounds(rounds(second * c) + rounds(first * s))
    return out


def _hadamard(vector: list[float]) -> list[float]:
    """Entry (i, j) of the matrix is -1 for an odd number of bits that i and j share, else 1."""
    width = len(vector)
    return [
        sum(-v if (i & j).bit_count() % 2 else v for j, v in enumerate(vector)) * width**-0.5
        for i in range(width)
    ]


def _fp8(vector: list[float]) -> list[float]:
    """e4m3 with the smallest power of two >= max(amax, 1e-4) / 448 as the scale of 128 dims."""
    out: list[float] = []
    for start in range(0, len(vector), 128):
        block = vector[start : start + 128]
        mantissa, exponent = math.frexp(max(1e-4, *map(abs, block)) / 448)
        scale = 2.0 ** (exponent - (mantissa == 0.5))
        codes = (torch.tensor(block) / scale).to(torch.float8_e4m3fn)
        out += (codes.float() * scale).tolist()
    return out
