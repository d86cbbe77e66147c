"""Greedy decoding over an HF model, plain and speculative, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle.reference_draft import ReferenceDraft


def load_target(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def plain(model: Any, prompt: list[int], steps: int, stop: set[int] = frozenset()) -> list[int]:
    """`steps` greedy tokens, or fewer when one of `stop` comes (it is included)."""
    out: list[int] = []
    cache, ids = None, torch.tensor([prompt])
    for _ in range(steps):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        token = int(result.logits[0, -1].argmax())
        out.append(token)
        if token in stop:
            break
        ids = torch.tensor([[token]])
    return out


@dataclass
class Trace:
    """What a speculative run committed.

    rounds: the tokens of each round, the correction or bonus last; without the prefill's.
    accepted: drafts accepted in each round, before any cut by the length limit.
    """

    first: int
    rounds: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [self.first, *(token for r in self.rounds for token in r)]

    @property
    def histogram(self) -> list[int]:
        """How many rounds accepted 0, 1, 2, ... drafts."""
        return [self.accepted.count(n) for n in range(max(self.accepted, default=0) + 1)]


@torch.no_grad()
def speculative(
    model: Any, draft: ReferenceDraft, prompt: list[int], steps: int, gamma: int
) -> Trace:
    """Draft gamma, verify all, keep the longest prefix that equals the target's own argmax."""

    def forward(ids: list[int]) -> tuple[Tensor, Tensor]:
        out = model(torch.tensor([ids]), output_hidden_states=True)
        layers = [out.hidden_states[i + 1][0] for i in draft.layer_ids]
        return out.logits[0].argmax(-1), torch.cat(layers, dim=-1)

    best, _ = forward(prompt)
    trace = Trace(int(best[-1]))
    while len(trace.tokens) < steps:
        committed = prompt + trace.tokens
        anchor, left = committed[-1], steps - len(trace.tokens)
        _, features = forward(committed)
        drafts = draft.draft(features[:-1], anchor, gamma)[: max(left - 1, 0)]
        best, _ = forward(committed + drafts)
        own = best[len(committed) - 1 :].tolist()
        n = 0
        while n < len(drafts) and drafts[n] == own[n]:
            n += 1
        trace.rounds.append([*drafts[:n], own[n]])
        trace.accepted.append(n)
    return trace
