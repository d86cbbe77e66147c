"""Checked entry to the grouped output projection."""

from __future__ import annotations

from torch import Tensor

from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.grouped_output.torch_grouped import grouped_output_torch

_MIN_TILE = 16


def grouped_output(
    o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, *, implementation: str = "auto"
) -> Tensor:
    """out[t, g] = weight[g] . concat over the heads of group g of R(-t) o[t, head].

    In DeepSeek-V4 keys and values are one latent, so attention outputs carry the keys' rotation.
    R(-t) undoes it at the query's position, on the last `rope` dims of every head, neighbours as
    pairs. The heads, in order, make up the groups.

    Args:
        o: [tokens, heads, head_dim] float; tokens may be 0.
        cos, sin: [tokens, rope / 2], tables at the query positions; rope <= head_dim.
        weight: [groups, rank, heads / groups * head_dim] in the dtype of o.
        implementation: auto, torch or triton. Triton needs rope and head_dim - rope to be
            multiples of 16.

    Returns:
        [tokens, groups * rank] in the dtype of o.

    Raises:
        ValueError: a shape or dtype that does not fit, or an implementation that cannot run.
    """
    _check(o, cos, sin, weight)
    if _triton(o, 2 * cos.shape[1], implementation):
        from sglang_ext.kernels.grouped_output.triton import grouped_output_triton as run
    else:
        run = grouped_output_torch
    return run(o.contiguous(), cos.contiguous(), sin.contiguous(), weight.contiguous())


def _triton(o: Tensor, rope: int, implementation: str) -> bool:
    dim = o.shape[2]
    if rope % _MIN_TILE == 0 and dim % _MIN_TILE == 0:
        return runs_triton("grouped_output", implementation, o.device)
    if implementation == "triton":
        raise ValueError(
            f"grouped_output: o: expected rope and plain dims in multiples of {_MIN_TILE} for "
            f"'triton', found {rope} and {dim - rope}; use 'auto' or 'torch'"
        )
    return False


def _check(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> None:
    if o.dim() != 3 or not o.is_floating_point():
        raise ValueError(
            f"grouped_output: o: expected float [tokens, heads, head_dim], found {o.dtype} "
            f"{list(o.shape)}"
        )
    tokens, heads, dim = o.shape
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != tokens:
        raise ValueError(
            f"grouped_output: cos, sin: expected both [{tokens}, rope / 2], found "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if 2 * cos.shape[1] > dim:
        raise ValueError(
            f"grouped_output: cos: expected at most {dim // 2} pairs of a head of {dim}, found "
            f"{cos.shape[1]}"
        )
    if weight.dim() != 3 or heads % weight.shape[0] or weight.dtype != o.dtype:
        raise ValueError(
            f"grouped_output: weight: expected {o.dtype} [a divisor of {heads} heads, rank, "
            f"inner], found {weight.dtype} {list(weight.shape)}"
        )
    inner = heads // weight.shape[0] * dim
    if weight.shape[2] != inner:
        raise ValueError(
            f"grouped_output: weight: expected inner size {inner}, heads of a group times "
            f"{dim}, found {weight.shape[2]}"
        )
