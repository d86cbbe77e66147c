"""Checked entries to index vectors; the formulas are in `core.indexer_v32` and `core.indexer_v4`.

DeepSeek-V3.2 and V4 rotate other dims in other pairs; the entries share no convention.
"""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core import indexer_v4, indexer_v32
from sglang_ext.core.indexer_v32 import Precision
from sglang_ext.kernels.choice import runs_triton


def index_query(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    precision: Precision = Precision.EXACT,
    *,
    implementation: str = "auto",
) -> Tensor:
    """DeepSeek-V3.2's index queries: the first dims rotated half-split, then rounded.

    Args:
        q: [tokens, heads, dim] float, projections; tokens may be 0.
        cos, sin: [tokens, half] float, half of the dims that turn; 2 * half <= dim.
        precision: EXACT, or FP8: turned by the Hadamard matrix of dim, a power of two, then e4m3
            with one power-of-two scale per 128 dims.
        implementation: auto, torch or triton.

    Returns:
        [tokens, heads, dim] in the dtype of q; FP8 values are decoded again.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an implementation that cannot run.
    """
    op = "index_query"
    _check(op, "q", q, 3, cos, sin)
    _check_width(op, "q", q, precision)
    if runs_triton(op, implementation, q.device):
        from sglang_ext.kernels.index_vectors.triton import index_vectors_triton

        return index_vectors_triton(q.contiguous(), None, *_contiguous(cos, sin), precision)
    return indexer_v32.index_query(q, cos, sin, precision)


def index_key(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    precision: Precision = Precision.EXACT,
    *,
    implementation: str = "auto",
) -> Tensor:
    """DeepSeek-V3.2's index keys: LayerNorm in float32, then as `index_query`.

    Args:
        k: [tokens, dim] float, projections; tokens may be 0.
        weight, bias: [dim] float, of the norm.
        cos, sin, precision, implementation: as `index_query`.

    Returns:
        [tokens, dim] in the dtype of k.

    Raises:
        ValueError: as `index_query`.
    """
    op = "index_key"
    _check(op, "k", k, 2, cos, sin)
    _check_width(op, "k", k, precision)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tuple(tensor.shape) != (k.shape[1],):
            raise ValueError(f"{op}: {name}: expected [{k.shape[1]}], found {list(tensor.shape)}")
    if runs_triton(op, implementation, k.device):
        from sglang_ext.kernels.index_vectors.triton import index_vectors_triton

        norm = (weight.contiguous(), bias.contiguous())
        turned = index_vectors_triton(
            k.contiguous().unsqueeze(1), norm, *_contiguous(cos, sin), precision
        )
        return turned.squeeze(1)
    return indexer_v32.index_key(k, weight, bias, cos, sin, precision)


def index_query_v4(q: Tensor, cos: Tensor, sin: Tensor, *, implementation: str = "auto") -> Tensor:
    """DeepSeek-V4's index queries: the last dims rotated, neighbours as pairs, in float32.

    Its index keys are entries of a compressor (`kernels.compress`).

    Args:
        q, cos, sin, implementation: as `index_query`.

    Returns:
        [tokens, heads, dim] in the dtype of q.

    Raises:
        ValueError: as `index_query`.
    """
    op = "index_query_v4"
    _check(op, "q", q, 3, cos, sin)
    if runs_triton(op, implementation, q.device):
        from sglang_ext.kernels.index_vectors.triton import trailing_pairs_triton

        return trailing_pairs_triton(q.contiguous(), *_contiguous(cos, sin))
    return indexer_v4.index_query(q, cos, sin)


def _check(op: str, name: str, x: Tensor, axes: int, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != axes or not x.is_floating_point():
        shape = "[tokens, heads, dim]" if axes == 3 else "[tokens, dim]"
        raise ValueError(f"{op}: {name}: expected float {shape}, found {x.dtype} {list(x.shape)}")
    if cos.dim() != 2 or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{op}: cos: expected [{x.shape[0]}, half] with half at most {x.shape[-1] // 2}, "
            f"found {list(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"{op}: sin: expected {list(cos.shape)} as cos, found {list(sin.shape)}")


def _check_width(op: str, name: str, x: Tensor, precision: Precision) -> None:
    dim = x.shape[-1]
    if precision is Precision.FP8 and (dim < 1 or dim & (dim - 1)):
        raise ValueError(f"{op}: {name}: expected a power of two as dim for fp8, found {dim}")


def _contiguous(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos.contiguous(), sin.contiguous()
