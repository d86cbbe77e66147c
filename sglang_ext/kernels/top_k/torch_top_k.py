"""The best entries in torch, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.indexer_v32 import choose


def best_entries_torch(scores: Tensor, values: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """See `api.best_entries`; arguments are taken as checked."""
    chosen = choose(scores, visible, top_k)
    batch, rows, entries = chosen.shape
    width = min(top_k, entries)
    # What is not chosen goes to one place too many, which is cut off.
    place = torch.where(chosen, chosen.cumsum(dim=-1) - 1, width)
    out = values.new_full((batch, rows, width + 1), -1)
    out.scatter_(2, place, values.unsqueeze(1).expand_as(place))
    return out[..., :width]
