"""What a DeepSeek-V3.2 layer hands to its attention backend beside the queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sglang_ext.core.mla import UpProjection


@dataclass(frozen=True)
class DsaInputs:
    """One layer's new tokens and the means to select and read old ones.

    Attributes:
        latent: [rows, latent + rope], normalised and rotated; goes into the pool.
        index_key: [rows, index dim]; goes into the pool.
        index_query: gives ([rows, index heads, index dim], [rows, index heads] float32). A call,
            because a forward whose contexts all fit into top_k needs none.
        up: turns latents into keys and values, or queries and outputs the other way.
        top_k: most tokens a row attends to.
        reuses_selection: read what the last layer that selected has selected.
        keeps_selection: remember this layer's selection for those after it.
    """

    latent: Tensor
    index_key: Tensor
    index_query: Callable[[], tuple[Tensor, Tensor]]
    up: UpProjection
    top_k: int
    reuses_selection: bool = False
    keeps_selection: bool = False
