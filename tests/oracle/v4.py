"""HF's DeepSeek-V4 as oracle, with the tie rule that this package documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _topk_earliest(scores: Tensor, k: int, dim: int = -1) -> Any:
    order = torch.sort(scores, dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=order.values[..., :k], indices=order.indices[..., :k])


@contextmanager
def earliest_wins() -> Iterator[None]:
    """HF's indexer with equal scores taken in the entries' order.

    torch.topk takes them in an order that depends on sizes, so HF's own choice for a sequence
    differs between one forward and a cached one. ReLU makes scores of exactly zero common.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

    original = DeepseekV4Indexer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        with mock.patch.object(torch.Tensor, "topk", _topk_earliest):
            return original(self, *args, **kwargs)

    with mock.patch.object(DeepseekV4Indexer, "forward", forward):
        yield


def load_hf(path: Path) -> Any:
    """The checkpoint in HF's model: every tensor used, none invented."""
    from transformers import DeepseekV4ForCausalLM

    model, info = DeepseekV4ForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@torch.no_grad()
def hf_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, vocab] of one uncached forward."""
    with earliest_wins():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0]
