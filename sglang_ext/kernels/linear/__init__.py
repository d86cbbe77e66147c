"""Linear layers of inference on the CPU: weights packed once, and what follows fused in."""

from sglang_ext.kernels.linear.api import (
    Linear,
    PackedLinear,
    PlainLinear,
    can_pack,
    make_linear,
    packing_works,
)
from sglang_ext.kernels.linear.gated import Gated, make_gated

__all__ = [
    "Gated",
    "Linear",
    "PackedLinear",
    "PlainLinear",
    "can_pack",
    "make_gated",
    "make_linear",
    "packing_works",
]
