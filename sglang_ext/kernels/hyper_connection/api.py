"""Checked entry to hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core import hyper_connection as vectorised
from sglang_ext.core.hyper_connection import HcMix
from sglang_ext.kernels.choice import runs_triton


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    implementation: str = "auto",
) -> HcMix:
    """x = sum_i pre_i X_i and the weights that `hc_post` takes; see `core.hyper_connection`.

    Args:
        streams: [tokens, n, D] float32, bfloat16 or float16; tokens may be 0.
        fn: [n * (2 + n), n * D] float32.
        base: [n * (2 + n)] float32.
        scale: [3] float32.
        iters: Sinkhorn iterations, at least 1.
        eps: added to pre and used by Sinkhorn.
        rms_eps: inside the root of the mean square.
        implementation: auto, torch or triton.

    Raises:
        ValueError: a shape or dtype that does not fit, or an implementation that cannot run.
    """
    n = _check_streams("hc_pre", streams)
    _check_weights("hc_pre", streams, {"fn": fn, "base": base, "scale": scale}, n * (2 + n), 3)
    if iters < 1:
        raise ValueError(f"hc_pre: iters: expected at least 1, found {iters}")
    if _triton("hc_pre", implementation, streams, n):
        from sglang_ext.kernels.hyper_connection.triton import hc_pre_triton as run
    else:
        run = vectorised.hc_pre
    streams = streams.contiguous()
    return run(streams, fn, base, scale, iters=iters, eps=eps, rms_eps=rms_eps)


def hc_post(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, implementation: str = "auto"
) -> Tensor:
    """X'_j = post_j y + sum_i comb[i, j] X_i.

    Args:
        y: [tokens, D] in the streams' dtype.
        streams: [tokens, n, D], what `hc_pre` was given.
        post: [tokens, n] float32.
        comb: [tokens, n, n] float32, summed over its FIRST stream axis.
        implementation: auto, torch or triton.

    Returns:
        [tokens, n, D] in the streams' dtype.

    Raises:
        ValueError: as `hc_pre`.
    """
    tokens, n, width = streams.shape[0], _check_streams("hc_post", streams), streams.shape[2]
    _check_one("hc_post", "y", y, (tokens, width), streams.dtype)
    _check_one("hc_post", "post", post, (tokens, n), torch.float32)
    _check_one("hc_post", "comb", comb, (tokens, n, n), torch.float32)
    if _triton("hc_post", implementation, streams, n):
        from sglang_ext.kernels.hyper_connection.triton import hc_post_triton as run
    else:
        run = vectorised.hc_post
    return run(y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous())


def hc_head(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    eps: float,
    rms_eps: float,
    implementation: str = "auto",
) -> Tensor:
    """h = sum_i w_i X_i, what the final norm reads.

    Args:
        streams: [tokens, n, D].
        fn: [n, n * D] float32.
        base: [n] float32.
        scale: [1] float32.
        eps, rms_eps: as `hc_pre`.
        implementation: auto, torch or triton.

    Returns:
        [tokens, D] in the streams' dtype.

    Raises:
        ValueError: as `hc_pre`.
    """
    n = _check_streams("hc_head", streams)
    _check_weights("hc_head", streams, {"fn": fn, "base": base, "scale": scale}, n, 1)
    if _triton("hc_head", implementation, streams, n):
        from sglang_ext.kernels.hyper_connection.triton import hc_head_triton as run
    else:
        run = vectorised.hc_head
    return run(streams.contiguous(), fn, base, scale, eps=eps, rms_eps=rms_eps)


def _triton(op: str, implementation: str, streams: Tensor, n: int) -> bool:
    """Triton tiles have a power of two of streams; another count runs in torch."""
    if n & (n - 1) == 0:
        return runs_triton(op, implementation, streams.device)
    if implementation == "triton":
        raise ValueError(
            f"{op}: streams: expected a power of two of streams for 'triton', found {n}; "
            "use 'auto' or 'torch'"
        )
    return False


def _check_streams(op: str, streams: Tensor) -> int:
    if streams.dim() != 3 or not streams.is_floating_point():
        raise ValueError(
            f"{op}: streams: expected float [tokens, n, D], found {streams.dtype} "
            f"{list(streams.shape)}"
        )
    return streams.shape[1]


def _check_weights(
    op: str, streams: Tensor, weights: dict[str, Tensor], outs: int, scales: int
) -> None:
    width = streams.shape[1] * streams.shape[2]
    shapes = {"fn": (outs, width), "base": (outs,), "scale": (scales,)}
    for name, tensor in weights.items():
        _check_one(op, name, tensor, shapes[name], torch.float32)
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name}: expected contiguous storage, found {tensor.stride()}")


def _check_one(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{op}: {name}: expected {dtype} {list(shape)}, found {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
