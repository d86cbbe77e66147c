"""DFlash 2's candidate selector: a path through the likeliest tokens of each slot.

    S_t(a, b) = U_t(b) + <A[a] * P h_t, B[b]>

a is the token chosen for the slot before (the anchor for the first), b one of the top-k candidates
of slot t. q is the softmax of S_t(a, .) over those k tokens and 0 elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.core.spec.markov import DraftSampling
from sglang_ext.core.spec.sampling import draw
from sglang_ext.core.spec.types import Proposal


class CandidateSelector(nn.Module):
    """Codebooks of the two neighbours of a transition and the projection that gates them.

    vocab_size: V, rank: r, hidden_size: d, top_k: candidates per slot
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def score_reference(
        self, slot_logits: Tensor, hidden: Tensor, previous: Tensor, candidates: Tensor
    ) -> Tensor:
        """S of one slot from the definition, request by request.

        slot_logits: [R, V], hidden: [R, d], previous: [R], candidates: [R, k]  ->  [R, k]
        """
        out = torch.empty(candidates.shape)
        for r, ids in enumerate(candidates):
            gate = self.predecessor_codebook[previous[r]] * self.hidden_projection(hidden[r])
            for c, b in enumerate(ids):
                out[r, c] = slot_logits[r, b] + gate @ self.successor_codebook[b]
        return out

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """([R, G, k] base logits, [R, G, k] ids) of the likeliest tokens; logits: [R, G, V]"""
        values, ids = logits.topk(self.top_k, dim=-1)
        return values.float(), ids

    def walk(
        self,
        values: Tensor,
        ids: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        sampling: DraftSampling | None = None,
    ) -> Proposal:
        """Chooses one candidate per slot, left to right.

        values, ids: [R, G, k] of `candidates`; hidden: [R, G, d]; anchors: [R] int64
        sampling: None takes the best transition everywhere (q one-hot); a `sampler` in it sees
        [R, k] scores and returns places among the k candidates
        """
        gates = self.hidden_projection(hidden)
        successors = F.embedding(ids, self.successor_codebook)
        previous = anchors
        tokens: list[Tensor] = []
        places: list[Tensor] = []
        laws: list[Tensor] = []
        for k in range(ids.shape[1]):
            gate = F.embedding(previous, self.predecessor_codebook) * gates[:, k]
            scores = values[:, k] + (successors[:, k] @ gate[:, :, None]).squeeze(2)
            place = scores.max(dim=-1).indices
            if sampling is not None:
                law = sampling.law(scores)
                place = _place(scores, law, place, sampling, k)
                laws.append(law)
            previous = ids[:, k].gather(1, place[:, None]).squeeze(1)
            places.append(place)
            tokens.append(previous)
        if sampling is None:
            return Proposal(torch.stack(tokens, dim=1))
        return Proposal(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(laws, dim=1),
            columns=torch.stack(places, dim=1),
            support=ids,
        )


def _place(scores: Tensor, law: Tensor, best: Tensor, sampling: DraftSampling, k: int) -> Tensor:
    """[R] place among the candidates: by coin, or fixed for greedy and seeded requests."""
    drawn = draw(law, sampling.coins[:, k])
    if sampling.fixed is None:
        return drawn
    fixed = best if sampling.sampler is None else sampling.sampler(scores, k)
    return torch.where(sampling.fixed, fixed, drawn)
