"""Native Sparse Attention's compression one entry and one token at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.nsa import NsaSpec


def compress_entries_reference(
    x: Tensor, position: Tensor, weight: Tensor, spec: NsaSpec
) -> Tensor:
    """See `api.compress_entries`; float32."""
    found = []
    start = 0
    while start + spec.length <= x.shape[0]:
        entry = torch.zeros(weight.shape[0], weight.shape[3])
        for i in range(spec.length):
            for g in range(weight.shape[0]):
                row = (x[start + i, g] + position[i, g]).float()
                entry[g] += (row.unsqueeze(1) * weight[g, i].float()).sum(dim=0)
        found.append(entry)
        start += spec.stride
    return torch.stack(found) if found else torch.zeros(0, weight.shape[0], weight.shape[3])
