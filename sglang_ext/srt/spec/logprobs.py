"""Log-probabilities of committed tokens, from the ragged rows of a verification."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from torch import Tensor

from sglang_ext.core.spec.types import VerifyPlan


def attach_logprobs(batch: Any, output: Any, plan: VerifyPlan, tokens: Tensor) -> None:
    """Fill the log-probability fields of `output`; tokens [R, G + 1], -1 past the committed ones.

    SGLang expects a rectangle of logits rows. Rows that were not verified repeat another row;
    their values are never read, since a request commits no more tokens than it has rows.
    """
    width = tokens.shape[1]
    ragged = output.next_token_logits
    padded = plan.padded(ragged, width)
    output.next_token_logits = padded.reshape(-1, ragged.shape[-1])
    compute_spec_logprobs(batch, output, tokens.clamp(min=0).reshape(-1), chain_stride=width)
