"""Sampled requests are sampled under SGLang's own tree drafts on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.speculative.eagle_utils"


def _greedy_only_if_all_are(original: Callable[..., bool], **question: bool) -> bool:
    return original(**{**question, "is_cpu": False})


def _sample_tree(*, target_probs: torch.Tensor, **arguments: Any) -> None:
    from sglang_ext.srt.sgl_kernel_torch.tree_sampling import (
        tree_speculative_sampling_target_only,
    )

    whole = target_probs / target_probs.sum(-1, keepdim=True)
    tree_speculative_sampling_target_only(target_probs=whole, **arguments)


def _apply() -> None:
    from sglang.srt.speculative import eagle_utils

    from sglang_ext.srt.sgl_kernel_torch.filters import keep_top_k, keep_top_p

    hook(f"{_MODULE}._verify_uses_greedy", _greedy_only_if_all_are, Kind.AROUND)
    eagle_utils.tree_speculative_sampling_target_only = _sample_tree
    eagle_utils.top_k_renorm_prob = keep_top_k
    eagle_utils.top_p_renorm_prob = keep_top_p


PATCH = Patch(
    name="eagle-sampling",
    target=f"{_MODULE}:_verify_uses_greedy",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="on a CPU, EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM answer requests with a temperature "
    "greedily and say nothing; the kernels that sample exist for CUDA only",
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/"
    "eagle_utils.py",
    signature="(*, is_all_greedy: 'bool', is_cpu: 'bool', is_hip: 'bool', is_xpu: 'bool', "
    "use_rejection_sampling: 'bool') -> 'bool'",
    until="SGLang samples draft trees on a CPU",
    apply=_apply,
)
