"""Moves rows inside KV buffers that are known only by their addresses."""

from __future__ import annotations

import ctypes

import torch

_WRITABLE = 0x200
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object


def _rows_at(address: int, rows: int, row_bytes: int) -> torch.Tensor:
    """The memory at `address` as [rows, row_bytes] uint8, or int64 words where they fit."""
    memory = _memory_view(address, rows * row_bytes, _WRITABLE)
    word = torch.int64 if row_bytes % 8 == 0 and address % 8 == 0 else torch.uint8
    return torch.frombuffer(memory, dtype=word).view(rows, -1)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copies rows src to rows tgt in every buffer; all are read before any is written.

    Args:
        data_ptrs: [buffers] uint64, addresses in host memory.
        strides: [buffers] int64, bytes of a row.
        tgt_loc, src_loc: [rows] int64, row numbers.
    """
    if tgt_loc.numel() == 0:
        return
    rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    source, target = src_loc.long(), tgt_loc.long()
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        buffer = _rows_at(address, rows, row_bytes)
        buffer[target] = buffer[source]
