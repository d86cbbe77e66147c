"""Checked entry to the mixture of experts."""

from __future__ import annotations

import torch

from sglang_ext.kernels.moe.activation import Activation
from sglang_ext.kernels.moe.experts import ExpertWeights, Routing
from sglang_ext.kernels.moe.torch_grouped import Inner, gate_up, routed_experts_torch


def _check(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> None:
    rows, hidden = x.shape
    if routing.ids.shape != routing.weights.shape or routing.ids.shape[0] != rows:
        raise ValueError(
            f"routed_experts: routing: expected ids and weights of [{rows}, top_k], found "
            f"{list(routing.ids.shape)} and {list(routing.weights.shape)}"
        )
    if experts.w13.shape[2] != hidden or experts.w2.shape[:2] != (experts.w13.shape[0], hidden):
        raise ValueError(
            f"routed_experts: experts: expected w13 [experts, width, {hidden}] and w2 "
            f"[experts, {hidden}, intermediate], found {list(experts.w13.shape)} and "
            f"{list(experts.w2.shape)}; quantised or transposed weights need another kernel"
        )
    if routing.weigh_input and routing.ids.shape[1] != 1:
        raise ValueError(
            "routed_experts: weigh_input: expected one expert per row, found "
            f"{routing.ids.shape[1]}"
        )


def routed_experts(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, activation: Activation
) -> torch.Tensor:
    """out[row] = sum over the row's choices of weight * (w2 act(w13 x[row] + b13) + b2).

    The sum is taken in float32, expert by expert in ascending order: the order of a row's terms
    does not depend on which rows came with it.

    Args:
        x: [rows, hidden]; rows may be 0.
        experts: linears in the dtype of x.
        routing: ids below 0 add nothing; a row may have none at all.
        activation: what stands between the linears.

    Returns:
        [rows, hidden] in the dtype of x.

    Raises:
        ValueError: shapes that do not fit, or an id beyond the last expert.
    """
    _check(x, experts, routing)
    return routed_experts_torch(x, experts, routing, activation)


def first_linear(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, activation: Activation
) -> tuple[Inner, torch.Tensor]:
    """`routed_experts` up to its second linear: what `second_linear` adds up, block by block.

    Returns:
        What the first linear made, and sums [rows, hidden] float32, all zero.

    Raises:
        ValueError: as `routed_experts`.
    """
    _check(x, experts, routing)
    return gate_up(x, experts, routing, activation)
