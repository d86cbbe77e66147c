"""The clamped swiglu one value at a time, in Python's own floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _value(gate: float, up: float, limit: float) -> float:
    if math.isnan(gate) or math.isnan(up):
        return math.nan
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    # exp(-gate) overflows where the sigmoid is 0 to any precision.
    return 0.0 * up if gate < -700 else gate / (1 + math.exp(-gate)) * up


def clamped_swiglu_reference(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """gate, up [rows, width] -> [rows, width] float32."""
    pairs = zip(gate.double().flatten().tolist(), up.double().flatten().tolist(), strict=True)
    return torch.tensor([_value(g, u, limit) for g, u in pairs]).float().view(gate.shape)
