"""HF's DeepSeek-V4 as oracle, with the tie rule that this package documents."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

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


def hf_logits_float64(model: Any, ids: Sequence[int]) -> Tensor:
    """`hf_logits` with every product, sum and norm in float64; the angles stay as they are."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

    to, narrow, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax
    rotary = hf.DeepseekV4RotaryEmbedding.forward

    def wide_to(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if dtype is not None:
            kwargs["dtype"] = torch.float64 if dtype is torch.float32 else dtype
        return to(x, *args, **kwargs)

    def wide_softmax(x: Tensor, dim: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.float64)

    def angles(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # In float32 on purpose: both sides round the product of position and frequency.
        with mock.patch.multiple(torch.Tensor, float=narrow, to=to):
            parts = rotary(self, to(x, torch.float32), *args, **kwargs)
        return tuple(part.double() for part in parts)

    wide = copy.deepcopy(model).double()
    # The fused experts know no float64.
    wide.set_experts_implementation("eager")
    with (
        mock.patch.object(hf.DeepseekV4RotaryEmbedding, "forward", angles),
        mock.patch.multiple(torch.Tensor, float=torch.Tensor.double, to=wide_to),
        mock.patch("torch.nn.functional.softmax", wide_softmax),
    ):
        return hf_logits(wide, ids)
