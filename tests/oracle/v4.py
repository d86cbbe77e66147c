"""HF's DeepSeek-V4 as oracle, with the tie rule that this package documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle import ties


@contextmanager
def earliest_wins() -> Iterator[None]:
    """HF's indexer with equal scores taken in order; see `tests.oracle.ties`."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

    with ties.earliest_wins(DeepseekV4Indexer):
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


@torch.no_grad()
def hf_streams(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, streams, hidden] behind the last layer, before they are collapsed."""
    kept: list[Tensor] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda _, given: kept.append(given[0][0]))
    hf_logits(model, ids)
    hook.remove()
    return kept[0]
