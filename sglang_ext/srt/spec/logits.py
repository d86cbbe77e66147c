"""Everything a request's parameters do to the target's logits before a token is chosen.

SGLang's order on its one decode row, kept on every verify row: penalties, grammar mask, logit bias,
custom logit processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from sglang_ext.core.spec.types import VerifyPlan
from sglang_ext.srt.spec.penalties import PenaltyBook


def needs_adjustment(batch: Any, book: PenaltyBook) -> bool:
    """Whether any request of the batch changes its logits."""
    info = batch.sampling_info
    return (
        batch.has_grammar
        or info.has_custom_logit_processor
        or info.logit_bias is not None
        or book.applies_to(batch.reqs)
    )


def adjust(
    logits: Tensor,
    batch: Any,
    book: PenaltyBook,
    window: Tensor,
    plan: VerifyPlan,
    grammar_barrier: Callable[[], None] | None,
) -> None:
    """Change `logits` [total, V] in place.

    window: [R, G + 1] int64, the anchor and its drafts, of which `plan` admits a prefix.
    """
    info = batch.sampling_info
    book.apply(logits, batch.reqs, window[:, 1:], plan)
    if batch.has_grammar:
        _grammar(logits, batch, window, plan, grammar_barrier)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[plan.row_request].to(logits.dtype))
    if info.has_custom_logit_processor:
        _custom_processors(logits, info, plan)


def _custom_processors(logits: Tensor, info: Any, plan: VerifyPlan) -> None:
    """Requests with a processor have one row each; the processor sees just that row."""
    for entry in info.custom_logit_processor.values():
        rows = torch.tensor([plan.cu_list[r] for r in entry.rows], device=logits.device)
        params = [info.custom_params[r] for r in entry.rows]
        logits[rows] = entry.processor(logits[rows], params)


def _grammar(
    logits: Tensor,
    batch: Any,
    window: Tensor,
    plan: VerifyPlan,
    barrier: Callable[[], None] | None,
) -> None:
    """Mask what the grammar forbids after each prefix of the drafts.

    SGLang walks the whole window; rows that were not admitted are cut from its mask.
    """
    width = plan.max_length + 1
    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=GrammarTree.from_linear_chain(window[:, :width]),
        sampling_info=batch.sampling_info,
        device=logits.device,
        barrier=barrier,
    )
    if mask is None:
        return
    rows = plan.row_request * width + plan.row_offset
    mask.grammar.apply_vocab_mask(logits=logits, vocab_mask=mask.vocab_mask[rows])
