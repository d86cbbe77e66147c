"""Expert choice of mixture-of-experts routers."""

from __future__ import annotations

import torch


def fused_moe_router_cpu(
    moe_softcapping: float,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router GEMM, soft cap, softmax over all experts and top-k.

    Args:
        moe_softcapping: logits become `cap * tanh(logits / cap)`; 0 leaves them.
        hidden_states: [rows, hidden].
        gating_output: [experts, hidden], the router's weight.
        correction_bias: [experts], added after the cap.

    Returns:
        weights [rows, topk] float32, ids [rows, topk] int32, the heaviest first.

    Raises:
        NotImplementedError: renormalize is set, which the CUDA original has no form of either.
    """
    if renormalize:
        raise NotImplementedError(
            "fused_moe_router_cpu: renormalize: expected False, found True; use the model's "
            "generic top-k instead"
        )
    logits = hidden_states.float() @ gating_output.float().t()
    if moe_softcapping:
        logits = moe_softcapping * torch.tanh(logits / moe_softcapping)
    if correction_bias is not None:
        logits = logits + correction_bias.float()
    weights, ids = logits.softmax(-1).topk(topk, dim=-1)
    return weights, ids.int()


def topk_sigmoid_cpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores; the bias takes part in the choice and not in the weight.

    Args:
        gating_output: [rows, experts] logits.
        correction_bias: [experts].

    Returns:
        weights [rows, topk] float32, ids [rows, topk] int32.
    """
    scores = gating_output.float().sigmoid()
    ranked = scores if correction_bias is None else scores + correction_bias.float()
    ids = ranked.topk(topk, dim=-1).indices
    return _weights_of(scores, ids, renormalize)


def topk_softmax_cpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `topk_sigmoid_cpu` with softmax scores."""
    scores = gating_output.float().softmax(-1)
    ranked = scores if correction_bias is None else scores + correction_bias.float()
    ids = ranked.topk(topk, dim=-1).indices
    return _weights_of(scores, ids, renormalize)


def _weights_of(
    scores: torch.Tensor, ids: torch.Tensor, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()
