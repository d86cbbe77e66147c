"""Sampled requests are sampled under SGLang's own tree drafts on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, MovedTargetError, Patch, Stage, Where

_MODULE = "sglang.srt.speculative.eagle_utils"


def _greedy_only_if_all_are(original: Callable[..., bool], **question: bool) -> bool:
    return original(**{**question, "is_cpu": False})


def _sample_tree(*, target_probs: torch.Tensor, **arguments: Any) -> None:
    from sglang_ext.srt.sgl_kernel_torch.tree_sampling import (
        tree_speculative_sampling_target_only,
    )

    whole = target_probs / target_probs.sum(-1, keepdim=True)
    tree_speculative_sampling_target_only(target_probs=whole, **arguments)


def _fill(name: str, load: Callable[[], Callable[..., Any]]) -> None:
    from sglang.srt.speculative import eagle_utils

    if not hasattr(eagle_utils, name):
        raise MovedTargetError(f"sglang-ext: {_MODULE} no longer calls {name}")
    setattr(eagle_utils, name, load())


def _tree() -> Callable[..., Any]:
    return _sample_tree


def _top_k() -> Callable[..., Any]:
    from sglang_ext.srt.sgl_kernel_torch.filters import keep_top_k

    return keep_top_k


def _top_p() -> Callable[..., Any]:
    from sglang_ext.srt.sgl_kernel_torch.filters import keep_top_p

    return keep_top_p


_UPSTREAM = (
    "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/"
    "eagle_utils.py"
)

PATCH = Patch(
    name="eagle-sampling",
    target=f"{_MODULE}:_verify_uses_greedy",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="on a CPU, EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM answer requests with a temperature "
    "greedily and say nothing; the kernels that sample exist for CUDA only",
    upstream=_UPSTREAM,
    signature="(*, is_all_greedy: 'bool', is_cpu: 'bool', is_hip: 'bool', is_xpu: 'bool', "
    "use_rejection_sampling: 'bool') -> 'bool'",
    until="SGLang samples draft trees on a CPU",
    apply=lambda: hook(f"{_MODULE}._verify_uses_greedy", _greedy_only_if_all_are, Kind.AROUND),
)


def _missing(name: str, source: str, load: Callable[[], Callable[..., Any]]) -> Patch:
    return Patch(
        name=f"eagle-{name.replace('_', '-')}",
        target=f"sglang.kernels.ops.{source}:{name}",
        kind=Kind.ADD,
        where=Where.CPU,
        stage=Stage.BACKEND,
        why="the name is empty where there is no CUDA, and sampling a draft tree calls it",
        upstream=_UPSTREAM,
        signature="data",
        until="SGLang samples draft trees on a CPU",
        apply=lambda: _fill(name, load),
    )


TREE_PATCH = _missing("tree_speculative_sampling_target_only", "speculative.verify_sampling", _tree)
TOP_K_PATCH = _missing("top_k_renorm_prob", "sampling.renorm", _top_k)
TOP_P_PATCH = _missing("top_p_renorm_prob", "sampling.renorm", _top_p)
