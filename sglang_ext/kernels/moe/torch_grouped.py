"""Mixture of experts in torch: rows sorted by expert, one pair of GEMMs per expert in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sglang_ext.kernels.moe.activation import Activation
from sglang_ext.kernels.moe.experts import ExpertWeights, Routing


@dataclass(frozen=True)
class _Groups:
    """Choices sorted by expert.

    Attributes:
        rows: [choices] int64, row of each choice.
        choices: [choices] int64, its place in the flattened [rows * top_k].
        slices: (expert, first, end) of every expert in use.
    """

    rows: torch.Tensor
    choices: torch.Tensor
    slices: tuple[tuple[int, int, int], ...]


def _group(ids: torch.Tensor, experts: int) -> _Groups:
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=experts + 1).tolist()
    if len(counts) > experts + 1:
        raise ValueError(
            f"routed_experts: ids: expected at most {experts - 1}, the last of {experts} experts, "
            f"found {len(counts) - 2}; use -1 for an expert on another rank"
        )
    elsewhere, slices, first = counts[0], [], 0
    for expert, count in enumerate(counts[1:]):
        if count:
            slices.append((expert, first, first + count))
            first += count
    order = order[elsewhere:]
    return _Groups(order // ids.shape[1], order, tuple(slices))


def _grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: _Groups
) -> torch.Tensor:
    """x [choices, in], weight [experts, out, in] -> [choices, out]; biases are added in float32."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, first, end in groups.slices:
        product = F.linear(x[first:end], weight[expert])
        if bias is not None:
            product = product.float() + bias[expert].float()
        out[first:end] = product
    return out


@dataclass(frozen=True)
class Inner:
    """What the first linear of the experts has made of their rows.

    Attributes:
        values: [choices, intermediate], activated, sorted by expert.
        weights: [choices, 1] float32, by which an output is multiplied; None for not at all.
        groups: which row and expert each of them belongs to.
    """

    values: torch.Tensor
    weights: torch.Tensor | None
    groups: _Groups


def gate_up(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, activation: Activation
) -> tuple[Inner, torch.Tensor]:
    """See `api.first_linear`; arguments are taken as checked."""
    groups = _group(routing.ids, experts.w13.shape[0])
    weights = routing.weights.reshape(-1)[groups.choices].float().unsqueeze(1)
    inner = x[groups.rows]
    if routing.weigh_input:
        inner = (inner * weights).to(x.dtype)
    inner = activation(_grouped_linear(inner, experts.w13, experts.w13_bias, groups))
    sums = torch.zeros(x.shape[0], experts.w2.shape[1], device=x.device)
    return Inner(inner, None if routing.weigh_input else weights, groups), sums


def second_linear(inner: Inner, experts: ExpertWeights, block: range, sums: torch.Tensor) -> None:
    """Add what the experts in `block` make of `inner` to sums [rows, hidden] float32.

    Blocks in ascending order add up to the bits of one block of all experts.
    """
    slices = tuple(one for one in inner.groups.slices if one[0] in block)
    if not slices:
        return
    first, end = slices[0][1], slices[-1][2]
    groups = _Groups(
        inner.groups.rows[first:end],
        inner.groups.choices[first:end],
        tuple((expert, a - first, b - first) for expert, a, b in slices),
    )
    out = _grouped_linear(inner.values[first:end], experts.w2, experts.w2_bias, groups).float()
    if inner.weights is not None:
        out *= inner.weights[first:end]
    sums.index_add_(0, groups.rows, out)


def routed_experts_torch(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, activation: Activation
) -> torch.Tensor:
    """See `api.routed_experts`; arguments are taken as checked."""
    inner, sums = gate_up(x, experts, routing, activation)
    second_linear(inner, experts, range(experts.w2.shape[0]), sums)
    return sums.to(x.dtype)
