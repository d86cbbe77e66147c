"""Routing in Triton: one program per token, everything in registers.

Experts are laid out as padded [groups, experts of a group], so that one kernel serves routers with
and without groups. The k best are taken one after the other; the first index wins among equals.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ext.core.router import ExpertChoice
from sglang_ext.kernels.launch import launch, next_power_of_2

_NORM_EPS = 1e-20


@triton.jit
def _log1p_of_exp(x):
    """log(1 + e^x). With u = e^-|x| and w = 1 + u rounded, log1p(u) = log(w) * u / (w - 1)."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    rounded_off = w == 1.0
    small = tl.where(rounded_off, u, tl.log(w) * tl.div_rn(u, tl.where(rounded_off, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def _score(logits, SIGMOID: tl.constexpr):
    x = logits.to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        score = tl.sqrt_rn(_log1p_of_exp(x))
    return score


@triton.jit
def _best_groups(biased, TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """int1 [GROUPS]: the groups whose two best scores sum highest; biased [GROUPS, members]."""
    first = tl.max(biased, axis=1)
    at = tl.argmax(biased, axis=1, tie_break_left=True)
    member = tl.arange(0, biased.shape[1])
    rest = tl.where(member[None, :] == at[:, None], float("-inf"), biased)
    value = first + tl.max(rest, axis=1)
    group = tl.arange(0, GROUPS)
    kept = group < 0
    for _ in tl.static_range(TOPK_GROUP):
        # A padded group sums to -inf and is taken only when nothing else is left.
        best = tl.argmax(value, axis=0, tie_break_left=True)
        kept = kept | (group == best)
        value = tl.where(group == best, float("-inf"), value)
    return kept


@triton.jit
def _route(
    logits,  # [tokens, experts]
    bias,  # [experts] float32
    ids,  # [tokens, TOP_K] int64
    weights,  # [tokens, TOP_K] float32
    experts,
    members,  # experts of a group
    scaling,
    norm_eps,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,  # padded
    MEMBERS: tl.constexpr,  # padded
    TOPK_GROUP: tl.constexpr,  # 0: no groups
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, MEMBERS)[None, :]
    expert = group * members + member
    inside = (member < members) & (expert < experts)
    score = _score(tl.load(logits + t * experts + expert, inside, 0.0), SIGMOID)
    biased = score + tl.load(bias + expert, inside, 0.0)
    biased = tl.where(inside, biased, float("-inf"))
    if TOPK_GROUP > 0:
        kept = _best_groups(biased, TOPK_GROUP, GROUPS)
        biased = tl.where(kept[:, None], biased, float("-inf"))
    flat_biased = tl.reshape(biased, (GROUPS * MEMBERS,))
    flat_score = tl.reshape(score, (GROUPS * MEMBERS,))
    place = tl.arange(0, GROUPS * MEMBERS)
    choice = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), dtype=tl.int32)
    value = tl.zeros((PADDED_K,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(flat_biased, axis=0, tie_break_left=True)
        hit = place == best
        chosen = tl.where(choice == k, (best // MEMBERS) * members + best % MEMBERS, chosen)
        value = tl.where(choice == k, tl.sum(tl.where(hit, flat_score, 0.0), axis=0), value)
        flat_biased = tl.where(hit, float("-inf"), flat_biased)
    value = tl.div_rn(value, tl.sum(value, axis=0) + norm_eps) * scaling
    tl.store(ids + t * TOP_K + choice, chosen.to(tl.int64), choice < TOP_K)
    tl.store(weights + t * TOP_K + choice, value, choice < TOP_K)


@triton.jit
def _route_hash(
    logits,  # [tokens, experts]
    token_ids,  # [tokens] int
    tid2eid,  # [vocabulary, TOP_K] int
    ids,
    weights,
    experts,
    scaling,
    norm_eps,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, PADDED_K)
    inside = choice < TOP_K
    token = tl.load(token_ids + t).to(tl.int64)
    expert = tl.load(tid2eid + token * TOP_K + choice, inside, 0).to(tl.int64)
    score = _score(tl.load(logits + t * experts + expert, inside, 0.0), False)
    score = tl.where(inside, score, 0.0)
    value = tl.div_rn(score, tl.sum(score, axis=0) + norm_eps) * scaling
    tl.store(ids + t * TOP_K + choice, expert, inside)
    tl.store(weights + t * TOP_K + choice, value, inside)


def _answer(logits: Tensor, top_k: int) -> ExpertChoice:
    tokens, device = logits.shape[0], logits.device
    return ExpertChoice(
        torch.empty(tokens, top_k, dtype=torch.int64, device=device),
        torch.empty(tokens, top_k, dtype=torch.float32, device=device),
    )


def route_top_k_triton(
    logits: Tensor,
    bias: Tensor,
    *,
    sigmoid: bool,
    n_group: int,
    topk_group: int,
    top_k: int,
    scaling: float,
) -> ExpertChoice:
    """Both top-k rules; topk_group 0 stands for a router without groups."""
    tokens, experts = logits.shape
    members = experts // n_group
    choice = _answer(logits, top_k)
    launch(
        _route, (tokens,),
        logits, bias, choice.ids, choice.weights, experts, members, scaling, _NORM_EPS,
        SIGMOID=sigmoid, GROUPS=next_power_of_2(n_group), MEMBERS=next_power_of_2(members),
        TOPK_GROUP=topk_group, TOP_K=top_k, PADDED_K=next_power_of_2(top_k),
        num_warps=1,
    )  # fmt: skip
    return choice


def route_hash_triton(
    logits: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scaling: float
) -> ExpertChoice:
    """See `api.route_hash`; contiguous arguments."""
    tokens, experts = logits.shape
    top_k = tid2eid.shape[1]
    choice = _answer(logits, top_k)
    launch(
        _route_hash, (tokens,),
        logits, token_ids, tid2eid, choice.ids, choice.weights, experts, scaling, _NORM_EPS,
        TOP_K=top_k, PADDED_K=next_power_of_2(top_k),
        num_warps=1,
    )  # fmt: skip
    return choice
