"""Checked entry to Native Sparse Attention."""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core import nsa as vectorised
from sglang_ext.core.nsa import NsaKeys, NsaSpec
from sglang_ext.kernels.choice import runs_triton


def native_sparse_attention(
    q: Tensor,
    keys: NsaKeys,
    gates: Tensor,
    positions: Tensor,
    spec: NsaSpec,
    *,
    scale: float,
    implementation: str = "auto",
) -> Tensor:
    """out = g_c A(q, entries) + g_s A(q, selected blocks) + g_w A(q, window), one sequence.

    Args:
        q: [rows, heads, dim] float; rows may be 0, any rows of the sequence in any order.
        keys: entries and per-token keys and values, in the dtype of q; heads % key heads == 0.
        gates: [rows, heads, 3] float, for compression, selection, window.
        positions: [rows] int, each from 0 to tokens - 1; not checked, that would wait for
            the device.
        spec: sizes of entries, blocks and window.
        scale: factor on q.k.
        implementation: auto, torch or triton.

    Returns:
        [rows, heads, value dim] in the dtype of q.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run.
    """
    _check(q, keys, gates, positions, spec)
    if runs_triton("native_sparse_attention", implementation, q.device):
        from sglang_ext.kernels.nsa.triton import native_sparse_attention_triton as run
    else:
        run = vectorised.native_sparse_attention
    keys = NsaKeys(*(x.contiguous() for x in keys))
    gates, positions = gates.contiguous(), positions.contiguous()
    return run(q.contiguous(), keys, gates, positions, spec, scale)


def _check(q: Tensor, keys: NsaKeys, gates: Tensor, positions: Tensor, spec: NsaSpec) -> None:
    op = "native_sparse_attention"
    rows, heads, dim = q.shape
    tokens, key_heads = keys.k_block.shape[:2]
    if heads % key_heads:
        raise ValueError(f"{op}: q: expected heads in multiples of {key_heads}, found {heads}")
    entries, value_dim = spec.entries(tokens), keys.v_block.shape[2]
    expected = {
        "k_entry": (entries, key_heads, dim),
        "v_entry": (entries, key_heads, value_dim),
        "k_block": (tokens, key_heads, dim),
        "v_block": (tokens, key_heads, value_dim),
        "k_window": (tokens, key_heads, dim),
        "v_window": (tokens, key_heads, value_dim),
    }
    for name, tensor in keys._asdict().items():
        if tuple(tensor.shape) != expected[name] or tensor.dtype != q.dtype:
            raise ValueError(
                f"{op}: {name}: expected {q.dtype} {list(expected[name])}, found {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if tuple(gates.shape) != (rows, heads, 3):
        raise ValueError(f"{op}: gates: expected [{rows}, {heads}, 3], found {list(gates.shape)}")
    if tuple(positions.shape) != (rows,) or positions.is_floating_point():
        raise ValueError(
            f"{op}: positions: expected int [{rows}], found {positions.dtype} "
            f"{list(positions.shape)}"
        )
