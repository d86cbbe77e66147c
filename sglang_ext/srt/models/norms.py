"""RMSNorm of SGLang's in every dtype that a model may have."""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.utils import is_cuda


def rms_norm(width: int, eps: float) -> RMSNorm:
    """In the default dtype; float32 in plain torch on CUDA, where the kernel takes 16 bits only."""
    wide = torch.get_default_dtype() == torch.float32
    return RMSNorm(width, eps=eps, force_native=wide and is_cuda())
