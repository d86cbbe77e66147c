"""Checked entry to Native Sparse Attention's compression."""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core import nsa as vectorised
from sglang_ext.core.nsa import NsaSpec
from sglang_ext.kernels.choice import runs_triton


def compress_entries(
    x: Tensor, position: Tensor, weight: Tensor, spec: NsaSpec, *, implementation: str = "auto"
) -> Tensor:
    """entry[e, g] = sum over i of (x[e * stride + i, g] + position[i, g]) weight[g, i].

    Args:
        x: [tokens, key heads, dim] float, keys or values of one sequence; tokens may be 0.
        position: [length, key heads, dim] in the dtype of x, added by the place in the block.
        weight: [key heads, length, dim, out dim] in the dtype of x.
        spec: sizes of entries.
        implementation: auto, torch or triton.

    Returns:
        [spec.entries(tokens), key heads, out dim] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an implementation that cannot run.
    """
    op = "compress_entries"
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"{op}: x: expected float [tokens, key heads, dim], found {x.dtype} {list(x.shape)}"
        )
    _, heads, dim = x.shape
    out_dim = weight.shape[-1] if weight.dim() == 4 else "out dim"
    for name, tensor, shape in (
        ("position", position, [spec.length, heads, dim]),
        ("weight", weight, [heads, spec.length, dim, out_dim]),
    ):
        if list(tensor.shape) != shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name}: expected {x.dtype} {shape}, found {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if runs_triton(op, implementation, x.device):
        from sglang_ext.kernels.nsa_compress.triton import compress_entries_triton

        arguments = (x.contiguous(), position.contiguous(), weight.contiguous())
        return compress_entries_triton(*arguments, spec)
    return vectorised.compress_entries(x, position, weight, spec)
