"""What a DeepSeek-V4 layer hands to its attention backend beside the queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class NewRows:
    """What new tokens give to a compressor, and how it ends.

    raw: [rows, 2 * series * dim] float32, see `core.compress.raw_rows`.
    norm: [dim], weight of the norm behind the pooling.
    """

    raw: Tensor
    norm: Tensor


@dataclass(frozen=True)
class IndexInputs:
    """An indexer's side of a layer.

    new: what the tokens give to its compressor.
    query: gives ([rows, heads, dim], [rows, heads] float32). A call, because a forward whose
        entries all fit into top_k needs none.
    top_k: most entries a row attends to.
    reuses_selection, keeps_selection: whether the layer reads what an earlier one selected, and
        whether a later one may read what this one selects.
    """

    new: NewRows
    query: Callable[[], tuple[Tensor, Tensor]]
    top_k: int
    reuses_selection: bool = False
    keeps_selection: bool = False


@dataclass(frozen=True)
class Dsv4Inputs:
    """One layer's new tokens and the means to select and read old ones.

    Attributes:
        latent: [rows, dim], normalised and rotated; key and value of the window.
        sink: [heads] float32 logits.
        ratio: 0, 4 or 128.
        eps: of the compressors' norms.
        angles: positions [n] -> (cos, sin) [n, rope / 2] of the layer's rotation.
        new: None without a compressor.
        index: None without an indexer.
    """

    latent: Tensor
    sink: Tensor
    ratio: int
    eps: float
    angles: Angles
    new: NewRows | None = None
    index: IndexInputs | None = None

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Dsv4Inputs:
        """The same with every tensor of new rows [rows, ...] changed; queries stay."""
        new, index = self.new, self.index
        if new is not None:
            new = replace(new, raw=change(new.raw))
        if index is not None:
            index = replace(index, new=replace(index.new, raw=change(index.new.raw)))
        return replace(self, latent=change(self.latent), new=new, index=index)
