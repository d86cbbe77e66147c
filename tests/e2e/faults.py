"""Faults planted in a server under test, one by name; nothing of this is part of the product.

The warm parent (`zygote`) plants the fault that SGLANG_EXT_TEST_FAULT names in a child before it
serves, and the ranks that the child forks inherit it. Each stands for a defect that was reported
of a speculative engine, and none raises an error or slows anything down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.e2e.layout_faults import LAYOUT_FAULTS
from tests.e2e.rank_faults import RANK_FAULTS
from tests.e2e.scripted_draft import SCRIPTED, install

VARIABLE = "SGLANG_EXT_TEST_FAULT"


def _residual_skipped() -> None:
    """After a rejection the token is drawn from p instead of the residual of p and q."""
    from sglang_ext.core.spec import accept

    accept._residual = lambda law, *_: law


def _bonus_of_wrong_row() -> None:
    """When every draft is accepted the bonus comes from the row before the last."""
    from sglang_ext.srt.spec import acceptance

    for name in ("accept_by_sample", "accept_mixed"):
        setattr(acceptance, name, _with_last_draft_repeated(getattr(acceptance, name)))


def _with_last_draft_repeated(law: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(plan: Any, *args: Any, **kwargs: Any) -> Any:
        result = law(plan, *args, **kwargs)
        tokens, accepted = result.tokens.clone(), result.accepted
        for r in range(len(accepted)):
            n = int(accepted[r])
            if n and n == plan.counts[r]:
                tokens[r, n] = tokens[r, n - 1]
        return dataclasses.replace(result, tokens=tokens)

    return faulty


def _markov_bias_missing_from_q() -> None:
    """Drafts are drawn with the Markov bias, and q is reported without it."""
    from sglang_ext.srt.spec import dspark

    right = dspark.propose

    def faulty(head: Any, base: Tensor, *args: Any, sampling: Any = None, **kwargs: Any) -> Any:
        proposal = right(head, base, *args, sampling=sampling, **kwargs)
        if proposal.probs is None:
            return proposal
        scaled = base.float() * sampling.inverse_temperature[:, :, None]
        return dataclasses.replace(proposal, probs=scaled.softmax(-1))

    dspark.propose = faulty


def _drafts_not_drawn_from_q() -> None:
    """Sampled requests draft the most likely token, and q says it was drawn."""
    from sglang_ext.core.spec import markov

    markov.draw = lambda law, coins: law.argmax(dim=-1)


def _penalties_ignored() -> None:
    """Verification rows are not penalised."""
    from sglang_ext.srt.spec.penalties import PenaltyBook

    PenaltyBook.apply = lambda *_: None  # type: ignore[method-assign]


def _penalties_of_first_row() -> None:
    """Every row is penalised as the anchor's row, drafts before it not counted."""
    from sglang_ext.srt.spec.penalties import PenaltyState

    right = PenaltyState.apply
    PenaltyState.apply = lambda self, logits, drafts: right(self, logits, [])  # type: ignore[method-assign]


def _stale_kv_row() -> None:
    """The target's K/V of the third verified row keep what an earlier round left there."""
    from sglang_ext.srt.spec.worker_base import BlockSpecWorker

    right = BlockSpecWorker._verify

    def faulty(self: Any, batch: Any, live: Any, proposal: Any, plan: Any, positions: Any) -> Any:
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = live.slots(table, 3)[:, 2].clone()
        pool = self.model_runner.token_to_kv_pool
        layers = range(pool.layer_num)
        buffers = [b for n in layers for b in (pool.get_key_buffer(n), pool.get_value_buffer(n))]
        old = [buffer[slots].clone() for buffer in buffers]
        result = right(self, batch, live, proposal, plan, positions)
        for buffer, rows in zip(buffers, old, strict=True):
            buffer[slots] = rows
        return result

    BlockSpecWorker._verify = faulty  # type: ignore[method-assign]


def _admission_looks_at_the_token() -> None:
    """The scheduler admits a draft by how likely the drawn token itself is."""
    from sglang_ext.srt.spec.pacing import Pacer

    right = Pacer.lengths

    def faulty(self: Any, keys: Any, proposal: Any, caps: list[int]) -> list[int]:
        lengths = right(self, keys, proposal, caps)
        if proposal.probs is None:
            return lengths
        columns = proposal.tokens if proposal.columns is None else proposal.columns
        chance = proposal.probs.gather(2, columns[:, :, None]).squeeze(2)
        sure = (chance > 0.5).long().cumprod(1).sum(1).tolist()
        return [min(n, m) for n, m in zip(lengths, sure, strict=True)]

    Pacer.lengths = faulty  # type: ignore[method-assign]


def _bias_of_anchor_row_only() -> None:
    """Logit bias reaches the anchor's row and no other."""
    from sglang_ext.srt.spec import logits as module

    right = module.adjust

    def faulty(logits: Tensor, batch: Any, book: Any, window: Tensor, plan: Any, wait: Any) -> None:
        before = logits.clone()
        right(logits, batch, book, window, plan, wait)
        if batch.sampling_info.logit_bias is not None:
            later = torch.tensor([o > 0 for o in plan.row_offset.tolist()])
            logits[later] = before[later]

    from sglang_ext.srt.spec import worker_base

    worker_base.adjust = faulty


FAULTS: dict[str, Callable[[], None]] = {
    "residual skipped": _residual_skipped,
    "bonus of the wrong row": _bonus_of_wrong_row,
    "Markov bias missing from q": _markov_bias_missing_from_q,
    "drafts not drawn from q": _drafts_not_drawn_from_q,
    "penalties ignored": _penalties_ignored,
    "penalties of the first row": _penalties_of_first_row,
    "stale KV row": _stale_kv_row,
    "admission looks at the token": _admission_looks_at_the_token,
    "bias on the anchor row only": _bias_of_anchor_row_only,
}


def plant(name: str | None) -> None:
    """Put the fault `name` into this process; None or "" plants nothing."""
    if name:
        (FAULTS | LAYOUT_FAULTS | RANK_FAULTS | {SCRIPTED: install})[name]()
