"""HF's top-k with the tie rule that this package documents: equal scores, the earliest wins.

torch.topk takes equal scores in an order that depends on sizes, so HF's own choice for a sequence
differs between one forward and a cached one. ReLU makes scores of exactly zero common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _topk_earliest(scores: Tensor, k: int, dim: int = -1) -> Any:
    order = torch.sort(scores, dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=order.values[..., :k], indices=order.indices[..., :k])


@contextmanager
def earliest_wins(indexer: type) -> Iterator[None]:
    """Inside, forwards of HF's `indexer` class follow the rule."""
    original = indexer.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        with mock.patch.object(torch.Tensor, "topk", _topk_earliest):
            return original(self, *args, **kwargs)

    with mock.patch.object(indexer, "forward", forward):
        yield
