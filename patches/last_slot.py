"""The slot before a request's next token is looked up in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.mem_cache.allocation"


def _in_torch(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def _apply() -> None:
    hook(f"{_MODULE}.get_last_loc", _in_torch, Kind.AROUND)


PATCH = Patch(
    name="last-slot",
    target=f"{_MODULE}:get_last_loc",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="page sizes above 1 need it, and it takes the Triton kernel for every attention backend "
    "but two named ones, without asking the platform whether Triton runs",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/mem_cache/"
    "allocation.py",
    signature="(req_to_token: 'torch.Tensor', req_pool_indices_tensor: 'torch.Tensor', "
    "prefix_lens_tensor: 'torch.Tensor') -> 'torch.Tensor'",
    until="get_last_loc asks the platform, as support_triton does",
    apply=_apply,
)
