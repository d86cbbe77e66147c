"""DSpark's serial heads: the block's base logits, corrected token by token (arXiv:2607.05147, 3.1).

    e = W1[x_{k-1}], x_0 = anchor;   q_k = softmax((U_k + B_k) / T)
    vanilla  B_k = W2 e
    gated    B_k = W2 (sigmoid(Wg [h_k ; e]) * e)
    rnn      (gate, cand, out) = Wj [s ; e ; h_k];  B_k = W2 tanh(out);
             s' = sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(cand), s_0 = 0

The bias applies at every position, the first included. Module names are those of the public
checkpoints (`markov_head.markov_w1.weight`, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.core.spec.argmax import row_argmax
from sglang_ext.core.spec.confidence import ConfidenceHead
from sglang_ext.core.spec.sampling import SamplingRows, draw, filtered_probs
from sglang_ext.core.spec.types import Proposal

# Draws a column for every request from [R, Vd] fp32 logits of step k (0-based), which are
# written over at the next step.
StepSampler = Callable[[Tensor, int], Tensor]


class MarkovHead(nn.Module):
    """Vanilla head.

    vocab_size:       V, rows of the previous-token table W1
    rank:             r
    draft_vocab_size: Vd, rows of W2; V when the draft's vocabulary is the target's
    """

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)
        # Stands in for the product with markov_w2 where a faster one is at hand.
        self.product: Callable[[Tensor], Tensor] | None = None

    def bias(self, mixed: Tensor) -> Tensor:
        """B_k = W2 mixed; [R, r] -> [R, Vd]"""
        return self.markov_w2(mixed) if self.product is None else self.product(mixed)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1[tokens]; [...] int64 -> [..., r]"""
        return F.embedding(tokens, self.markov_w1.weight)

    def start(self, hidden: Tensor) -> Tensor | None:
        """What the head can prepare for a whole block; hidden: [R, G, d]"""
        return None

    def mix(
        self, e: Tensor, k: int, prepared: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The vector that W2 turns into the bias of step k, and the next state; e: [R, r]"""
        return e, None


class GatedMarkovHead(MarkovHead):
    """Gates the embedding by the draft's hidden state [.., d]."""

    def __init__(
        self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(vocab_size, rank, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def start(self, hidden: Tensor) -> Tensor:
        """[R, G, r] the part of the gate that does not depend on the previous token."""
        weight = self.gate_proj.weight
        return F.linear(hidden, weight[:, : -self.rank], self.gate_proj.bias)

    def mix(
        self, e: Tensor, k: int, prepared: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert prepared is not None
        gate = prepared[:, k] + F.linear(e, self.gate_proj.weight[:, -self.rank :])
        return gate.sigmoid() * e, None


class RnnMarkovHead(MarkovHead):
    """Carries a state [R, r] along the block."""

    def __init__(
        self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(vocab_size, rank, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, hidden: Tensor) -> Tensor:
        """[R, G, 3r] the part of the joint projection that depends on the hidden state alone."""
        weight = self.joint_proj.weight
        return F.linear(hidden, weight[:, 2 * self.rank :], self.joint_proj.bias)

    def mix(
        self, e: Tensor, k: int, prepared: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert prepared is not None
        state = torch.zeros_like(e) if state is None else state
        weight = self.joint_proj.weight[:, : 2 * self.rank]
        joint = prepared[:, k] + F.linear(torch.cat((state, e), dim=-1), weight)
        gate, candidate, out = joint.chunk(3, dim=-1)
        return out.tanh(), torch.lerp(candidate.tanh(), state, gate.sigmoid())


def build_markov_head(
    kind: str,
    *,
    vocab_size: int,
    rank: int,
    hidden_size: int,
    draft_vocab_size: int | None = None,
) -> MarkovHead:
    """The head that a checkpoint's `markov_head_type` names."""
    if kind == "vanilla":
        return MarkovHead(vocab_size, rank, draft_vocab_size)
    if kind == "gated":
        return GatedMarkovHead(vocab_size, rank, hidden_size, draft_vocab_size)
    if kind == "rnn":
        return RnnMarkovHead(vocab_size, rank, hidden_size, draft_vocab_size)
    raise ValueError(
        f"markov_head_type: expected vanilla, gated or rnn, found {kind!r}; "
        "use a checkpoint with one of these heads"
    )


@dataclass(frozen=True, eq=False)
class DraftSampling:
    """How a batch draws its drafts when not every request is greedy.

    inverse_temperature: [R, 1] fp32, 1/T of each request (anything for greedy ones)
    coins:   [R, G] in [0, 1), spent by the requests that keep their real q
    fixed:   [R] bool, True for requests whose draft is a function of the logits (greedy, seeded);
             None when every request draws by coin
    sampler: draws those from ([R, Vd] raw logits, step) -> [R] columns, all requests at once;
             None takes the argmax
    filters: [R] the requests' top-k, top-p and min-p, applied to q as they are to p: what the
             target can never choose is not drafted; None leaves q as it is
    """

    inverse_temperature: Tensor
    coins: Tensor
    fixed: Tensor | None = None
    sampler: StepSampler | None = None
    filters: SamplingRows | None = None

    def law(self, logits: Tensor) -> Tensor:
        """q of one step: [R, C] raw logits -> [R, C] fp32, rows sum to 1."""
        law = torch.softmax(logits * self.inverse_temperature, dim=-1)
        return law if self.filters is None else filtered_probs(law, self.filters)


def draft_target_ids(d2t: Tensor) -> Tensor:
    """Target id of every draft id: EAGLE-3's `d2t` holds differences; [Vd] int64 -> [Vd] int64"""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def propose(
    head: MarkovHead,
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    *,
    sampling: DraftSampling | None = None,
    confidence: ConfidenceHead | None = None,
    target_ids: Tensor | None = None,
) -> Proposal:
    """Drafts a block: one cheap step per token, no model forward.

    base_logits: [R, G, Vd], any float dtype
    hidden:      [R, G, d], after the draft's final norm
    anchors:     [R] int64, target ids
    sampling:    None drafts greedily (q one-hot) without keeping any logits
    target_ids:  [Vd] int64 from `draft_target_ids`; None when the vocabularies are the same
    """
    if sampling is None:
        tokens, _ = _draft(head, base_logits, hidden, anchors, target_ids, _pick_greedy)
        return Proposal(tokens, None, _confidence(confidence, head, hidden, anchors, tokens))
    picker = _Picker(sampling, base_logits)
    tokens, columns = _draft(head, base_logits, hidden, anchors, target_ids, picker)
    return Proposal(
        tokens=tokens,
        probs=picker.probs,
        confidence=_confidence(confidence, head, hidden, anchors, tokens),
        columns=None if target_ids is None else columns,
        support=target_ids,
    )


def _draft(
    head: MarkovHead,
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    target_ids: Tensor | None,
    pick: StepSampler,
) -> tuple[Tensor, Tensor]:
    """([R, G] target ids, [R, G] columns) of the block, left to right."""
    prepared, state, previous = head.start(hidden), None, anchors
    tokens: list[Tensor] = []
    columns: list[Tensor] = []
    # One buffer for all steps: fresh memory of this size costs more than the arithmetic.
    logits = base_logits.new_empty(base_logits[:, 0].shape, dtype=torch.float32)
    for k, base in enumerate(base_logits.unbind(1)):
        mixed, state = head.mix(head.embed(previous), k, prepared, state)
        column = pick(logits.copy_(base).add_(head.bias(mixed)), k)
        previous = column if target_ids is None else target_ids[column]
        columns.append(column)
        tokens.append(previous)
    return torch.stack(tokens, dim=1), torch.stack(columns, dim=1)


def _pick_greedy(logits: Tensor, k: int) -> Tensor:
    return row_argmax(logits)


class _Picker:
    """Draws step by step and keeps q."""

    def __init__(self, sampling: DraftSampling, base_logits: Tensor) -> None:
        self.sampling = sampling
        self.probs = torch.empty(base_logits.shape, dtype=torch.float32, device=base_logits.device)

    def __call__(self, logits: Tensor, k: int) -> Tensor:
        rule = self.sampling
        law = rule.law(logits)
        self.probs[:, k] = law
        column = draw(law, rule.coins[:, k])
        if rule.fixed is None:
            return column
        chosen = (rule.sampler or _pick_greedy)(logits, k)
        return torch.where(rule.fixed, chosen, column)


def _confidence(
    confidence: ConfidenceHead | None,
    head: MarkovHead,
    hidden: Tensor,
    anchors: Tensor,
    tokens: Tensor,
) -> Tensor | None:
    """[R, G] raw logits, each from the token BEFORE the one it rates."""
    if confidence is None:
        return None
    previous = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
    return confidence(hidden, head.embed(previous) if confidence.with_markov else None)
