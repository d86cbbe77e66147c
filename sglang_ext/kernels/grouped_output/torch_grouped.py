"""Grouped output projection as one rotation and one batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.rope import rotate_trailing_pairs


def grouped_output_torch(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    """See `api.grouped_output`."""
    tokens, (groups, rank, inner) = o.shape[0], weight.shape
    unrotated = rotate_trailing_pairs(o, cos, sin, inverse=True)
    by_group = unrotated.reshape(tokens, groups, inner).transpose(0, 1)
    return (
        torch.bmm(by_group, weight.transpose(1, 2)).transpose(0, 1).reshape(tokens, groups * rank)
    )
