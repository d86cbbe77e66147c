"""Checked entry to expert routing; the rules are in `core.router`."""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core import router as vectorised
from sglang_ext.core.router import ExpertChoice
from sglang_ext.kernels.choice import runs_triton


def route_sqrtsoftplus(
    logits: Tensor, bias: Tensor, *, top_k: int, scaling: float, implementation: str = "auto"
) -> ExpertChoice:
    """Top-k of p + bias, weights p / sum p * scaling, p = sqrt(softplus(logits)) (DeepSeek-V4).

    Args:
        logits: [tokens, experts] float; tokens may be 0.
        bias: [experts] float32.
        top_k: 1 to experts.
        scaling: factor on the normalised weights.
        implementation: auto, torch or triton.

    Raises:
        ValueError: shapes or numbers that do not fit, or an implementation that cannot run.
    """
    op = "route_sqrtsoftplus"
    _check_logits(op, logits, bias)
    _check_range(op, "top_k", top_k, logits.shape[1])
    if runs_triton(op, implementation, logits.device):
        from sglang_ext.kernels.router.triton import route_top_k_triton

        return route_top_k_triton(
            logits.contiguous(), bias.contiguous(),
            sigmoid=False, n_group=1, topk_group=0, top_k=top_k, scaling=scaling,
        )  # fmt: skip
    return vectorised.route_sqrtsoftplus(logits, bias, top_k=top_k, scaling=scaling)


def route_hash(
    logits: Tensor,
    token_ids: Tensor,
    tid2eid: Tensor,
    *,
    scaling: float,
    implementation: str = "auto",
) -> ExpertChoice:
    """Experts tid2eid[token id], weights as `route_sqrtsoftplus` (DeepSeek-V4, first layers).

    Args:
        logits: [tokens, experts] float; tokens may be 0.
        token_ids: [tokens] int; each inside the table.
        tid2eid: [vocabulary, top_k] int; each inside the experts.
        scaling: factor on the normalised weights.
        implementation: auto, torch or triton.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run.
    """
    op = "route_hash"
    _check_matrix(op, "logits", logits)
    if token_ids.shape != logits.shape[:1] or token_ids.is_floating_point():
        raise ValueError(
            f"{op}: token_ids: expected int [{logits.shape[0]}], found {token_ids.dtype} "
            f"{list(token_ids.shape)}"
        )
    if tid2eid.dim() != 2 or tid2eid.is_floating_point():
        raise ValueError(
            f"{op}: tid2eid: expected int [vocabulary, top_k], found {tid2eid.dtype} "
            f"{list(tid2eid.shape)}"
        )
    if runs_triton(op, implementation, logits.device):
        from sglang_ext.kernels.router.triton import route_hash_triton

        tables = (token_ids.contiguous(), tid2eid.contiguous())
        return route_hash_triton(logits.contiguous(), *tables, scaling=scaling)
    return vectorised.route_hash(logits, token_ids, tid2eid, scaling=scaling)


def route_grouped_sigmoid(
    logits: Tensor,
    bias: Tensor,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    scaling: float,
    implementation: str = "auto",
) -> ExpertChoice:
    """Top-k of sigmoid(logits) + bias inside the best groups (DeepSeek-V3, V3.2).

    Args:
        logits: [tokens, experts] float; experts % n_group == 0, two or more in a group.
        bias: [experts] float32.
        n_group, topk_group: how many groups there are, and how many stay.
        top_k: 1 to the experts of the kept groups.
        scaling: factor on the normalised weights.
        implementation: auto, torch or triton.

    Raises:
        ValueError: shapes or numbers that do not fit, or an implementation that cannot run.
    """
    op = "route_grouped_sigmoid"
    _check_logits(op, logits, bias)
    experts = logits.shape[1]
    if n_group < 1 or experts % n_group or experts // n_group < 2:
        raise ValueError(
            f"{op}: n_group: expected a divisor of {experts} experts that leaves two in a group, "
            f"found {n_group}"
        )
    _check_range(op, "topk_group", topk_group, n_group)
    _check_range(op, "top_k", top_k, topk_group * experts // n_group)
    rule = {"n_group": n_group, "topk_group": topk_group, "top_k": top_k}
    if runs_triton(op, implementation, logits.device):
        from sglang_ext.kernels.router.triton import route_top_k_triton

        return route_top_k_triton(
            logits.contiguous(), bias.contiguous(), sigmoid=True, scaling=scaling, **rule
        )
    return vectorised.route_grouped_sigmoid(logits, bias, scaling=scaling, **rule)


def _check_matrix(op: str, name: str, x: Tensor) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{op}: {name}: expected float [tokens, experts], found {x.dtype} {list(x.shape)}"
        )


def _check_logits(op: str, logits: Tensor, bias: Tensor) -> None:
    _check_matrix(op, "logits", logits)
    if bias.shape != logits.shape[1:] or not bias.is_floating_point():
        raise ValueError(
            f"{op}: bias: expected float [{logits.shape[1]}], found {bias.dtype} {list(bias.shape)}"
        )


def _check_range(op: str, name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{op}: {name}: expected 1 to {most}, found {value}")
