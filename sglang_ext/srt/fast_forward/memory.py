"""Whether a packed copy of the weights may stand beside the originals.

The originals stay: weights can be replaced over RPC, which writes into them, and other readers (a
draft's context projection, a weight checker) expect them.
"""

from __future__ import annotations

import psutil
from torch import nn

from sglang_ext.kernels.linear import can_pack

_SHARE_OF_FREE = 0.25


def packing_fits(model: nn.Module) -> bool:
    """Whether all that would be packed takes at most a quarter of the memory that is free."""
    seen: set[int] = set()
    total = 0
    for parameter in model.parameters():
        if parameter.data_ptr() not in seen and can_pack(parameter):
            seen.add(parameter.data_ptr())
            total += parameter.nbytes
    return total <= _SHARE_OF_FREE * psutil.virtual_memory().available
