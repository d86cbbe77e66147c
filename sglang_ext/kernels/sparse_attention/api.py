"""Checked entry to sparse attention."""

from __future__ import annotations

from torch import Tensor

from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.sparse_attention.rows import Rows
from sglang_ext.kernels.sparse_attention.torch_sparse import sparse_attention_torch


def sparse_attention(
    q: Tensor,
    sources: tuple[Rows, ...],
    *,
    sink: Tensor | None,
    scale: float,
    value_dim: int,
    implementation: str = "auto",
) -> Tensor:
    """out[n, h] = sum_j softmax_j(q[n, h] . k[n, j] * scale, sink[h]) k[n, j, :value_dim].

    k[n] are the rows that all sources name for query n, in any order. The sink is a logit in the
    denominator that brings no value. DeepSeek-V4 reads the window's latents and the compressed
    entries, value_dim = dim; DeepSeek-V3.2 reads one source, dim 576 and value_dim 512.

    Args:
        q: [queries, heads, dim]; queries may be 0.
        sources: one or two `Rows`; a query that names no row gives 0.
        sink: [heads] float32, or None.
        scale: on the products.
        value_dim: leading dimensions of a row that are its value.
        implementation: auto, torch or triton.

    Returns:
        [queries, heads, value_dim] in the dtype of q, computed in float32.

    Raises:
        ValueError: shapes that contradict each other, with expected and found; an
            implementation that cannot run.
    """
    queries, heads, dim = q.shape
    for number, source in enumerate(sources):
        _expect(f"sources[{number}].pool", source.pool, (source.pool.shape[0], dim))
        _expect(f"sources[{number}].index", source.index, (queries, source.index.shape[1]))
    if sink is not None:
        _expect("sink", sink, (heads,))
    if len(sources) not in (1, 2) or not 1 <= value_dim <= dim:
        raise ValueError(
            f"sparse_attention: expected one or two sources and value_dim 1 to {dim}, found "
            f"{len(sources)} and {value_dim}"
        )
    if not runs_triton("sparse_attention", implementation, q.device):
        return sparse_attention_torch(q, sources, sink, scale, value_dim)
    from sglang_ext.kernels.sparse_attention.triton import sparse_attention_triton

    sources = tuple(Rows(s.pool.contiguous(), s.index.contiguous()) for s in sources)
    return sparse_attention_triton(q.contiguous(), sources, sink, scale, value_dim)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"sparse_attention: {name}: expected {list(shape)}, found {list(tensor.shape)}"
        )
