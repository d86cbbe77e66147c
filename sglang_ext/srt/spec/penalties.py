"""Frequency, presence, repetition and minimum-length penalties on every verify row.

Row j of a request follows j drafts that are not committed yet, so its penalties count them too.
SGLang's own penalizers know one row per request and lag behind; the counts are kept here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.spec.types import VerifyPlan

# States kept, at least, before those of requests that are gone are looked for.
_PRUNE_AT = 1024


@dataclass(frozen=True)
class PenaltyRule:
    """A request's penalty parameters, in SGLang's meaning of each."""

    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, req: Any) -> PenaltyRule | None:
        """The rule of a request, or None when it asks for no penalty."""
        p = req.sampling_params
        if (
            p.frequency_penalty == 0.0
            and p.presence_penalty == 0.0
            and p.repetition_penalty == 1.0
            and p.min_new_tokens <= 0
        ):
            return None
        return cls(
            p.frequency_penalty,
            p.presence_penalty,
            p.repetition_penalty,
            p.min_new_tokens,
            _stop_ids(req),
        )


def _stop_ids(req: Any) -> frozenset[int]:
    """Every token that would end the request."""
    ids: set[int | None] = set(req.sampling_params.stop_token_ids or ())
    ids |= set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ())
        ids.add(req.tokenizer.eos_token_id)
    return frozenset(i for i in ids if i is not None)


@dataclass
class PenaltyState:
    """Tokens a request has emitted so far."""

    req: Any
    rule: PenaltyRule
    counts: Counter[int]
    emitted: int

    @classmethod
    def of(cls, req: Any) -> PenaltyState | None:
        """From the request's output so far; None when it asks for no penalty."""
        rule = PenaltyRule.of(req)
        if rule is None:
            return None
        state = cls(req, rule, Counter(), 0)
        state.extend(req.output_ids)
        return state

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.counts[token] += 1
            self.emitted += 1

    def write(self, info: Any, row: int) -> None:
        """Put the penalties into SGLang's additive and scaling tensors, [requests, V] each."""
        additive, rule = info.acc_additive_penalties[row], self.rule
        additive.zero_()
        if rule.min_new_tokens > self.emitted and rule.stop_ids:
            additive[sorted(rule.stop_ids)] = -torch.inf
        seen = torch.tensor(list(self.counts), device=additive.device)
        times = torch.tensor(list(self.counts.values()), device=additive.device)
        additive[seen] -= times * rule.frequency + rule.presence
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[row, seen] = rule.repetition

    def apply(self, logits: Tensor, drafts: list[int]) -> None:
        """Penalise one row [V] in place, as if `drafts` had been emitted as well."""
        counts = self.counts + Counter(drafts) if drafts else self.counts
        rule, device = self.rule, logits.device
        if rule.min_new_tokens > self.emitted + len(drafts) and rule.stop_ids:
            logits[torch.tensor(sorted(rule.stop_ids), device=device)] = -torch.inf
        if not counts:
            return
        seen = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        values = logits[seen] - (times * rule.frequency + rule.presence).to(logits.dtype)
        if rule.repetition != 1.0:
            values = torch.where(values < 0, values * rule.repetition, values / rule.repetition)
        logits[seen] = values


def restore_at_prefill(batch: Any) -> None:
    """Penalise what a request had emitted before it was retracted and prefilled again.

    SGLang starts its penalizers afresh there; the token that this prefill samples is penalised by
    the two tensors of the forward's own copy of the sampling info.
    """
    info = batch.sampling_info
    if info is None or info.acc_additive_penalties is None:
        return
    for row, req in enumerate(batch.reqs):
        state = PenaltyState.of(req) if req.output_ids else None
        if state is not None:
            state.write(info, row)


class PenaltyBook:
    """The penalty state of every live request that has a penalty."""

    def __init__(self) -> None:
        self._states: dict[str, PenaltyState] = {}
        self._prune_at = _PRUNE_AT

    def begin(self, req: Any, first: int) -> None:
        """(Re)start a request after a prefill that sampled `first`."""
        self.forget(req.rid)
        state = PenaltyState.of(req)
        if state is None:
            return
        if len(self._states) >= self._prune_at:
            self._prune()
        state.extend([first])
        self._states[req.rid] = state

    def _prune(self) -> None:
        """Drop requests that ended without a decode step, which nobody reports."""
        self._states = {rid: s for rid, s in self._states.items() if not s.req.finished()}
        self._prune_at = max(_PRUNE_AT, 2 * len(self._states))

    def commit(self, reqs: list[Any], tokens: list[list[int]]) -> None:
        for req, new in zip(reqs, tokens, strict=True):
            if (state := self._states.get(req.rid)) is not None:
                state.extend(new)

    def forget(self, rid: str) -> None:
        self._states.pop(rid, None)

    def applies_to(self, reqs: list[Any]) -> bool:
        return bool(self._states) and any(req.rid in self._states for req in reqs)

    def apply(self, logits: Tensor, reqs: list[Any], drafts: Tensor, plan: VerifyPlan) -> None:
        """logits [total, V] in place; drafts [R, G] int64."""
        for r, req in enumerate(reqs):
            state = self._states.get(req.rid)
            if state is None:
                continue
            row, ahead = plan.cu_list[r], drafts[r].tolist()
            for j in range(plan.row_counts[r]):
                state.apply(logits[row + j], ahead[:j])
