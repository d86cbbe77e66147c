"""The chosen ones of a list, in order, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen_values(chosen: Tensor, values: Tensor, width: int) -> Tensor:
    """Values of the True entries in order, -1 after the last.

    chosen [batch, rows, entries] bool, at most `width` True in a row; values [batch, entries]
    -> [batch, rows, width] int64.
    """
    batch, rows, _ = chosen.shape
    # What is not chosen goes to one place too many, which is cut off.
    place = torch.where(chosen, chosen.cumsum(dim=-1) - 1, width)
    out = values.new_full((batch, rows, width + 1), -1)
    out.scatter_(2, place, values.unsqueeze(1).expand_as(place))
    return out[..., :width]
