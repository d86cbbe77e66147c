"""A Llama target over token rows: every row names its sequence slot and its position.

One forward serves decoding (a row per live sequence), prefill (the rows of a prompt) and the
teacher-forced pass of training (the rows of whole texts); they may share a batch, because a row
attends only to its own slot, up to its own position.

Two backends for what is not a matmul: AVX512-BF16 code compiled on first use, and plain torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from sglang_ext.env import CACHE_DIR

_SOURCE = Path(__file__).with_name("rows_avx512.cpp")


class RowOps(Protocol):
    """What a decoder layer does besides matmuls. Rows are bf16; `layer` selects the cache."""

    def attend(
        self, layer: int, qkv: torch.Tensor, slot: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads * head_dim]."""

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add `delta` into `residual` [rows, hidden] in place; return its RMS norm."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [rows, 2 * width] -> silu(gate) * up [rows, width]."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, vocab] -> [rows] int64."""


class CacheShape:
    """Sizes of the key/value cache and the rope tables that every backend needs."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        capacity: int,
        rope_theta: float,
        norm_eps: float,
    ) -> None:
        if capacity % 16:
            raise ValueError(f"capacity: expected a multiple of 16, found {capacity}")
        self.layers, self.heads, self.kv_heads, self.head_dim = layers, heads, kv_heads, head_dim
        self.slots, self.capacity, self.norm_eps = slots, capacity, norm_eps
        frequency = rope_theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        angle = torch.arange(capacity).double()[:, None] * frequency
        self.cosine, self.sine = angle.cos().float(), angle.sin().float()  # [capacity, head_dim/2]


class TorchRowOps:
    """Reference backend: gathers each row's keys and masks them. Correct everywhere, slow."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        size = (shape.layers, shape.slots, shape.kv_heads, shape.capacity, shape.head_dim)
        self.keys = torch.zeros(size, dtype=torch.bfloat16)
        self.values = torch.zeros(size, dtype=torch.bfloat16)

    def attend(
        self, layer: int, qkv: torch.Tensor, slot: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        s = self.shape
        heads = qkv.view(len(qkv), -1, s.head_dim)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q, k = self._rotate(q, position), self._rotate(k, position)
        self.keys[layer, slot, :, position] = k
        self.values[layer, slot, :, position] = v
        longest = int(position.max()) + 1
        visible = torch.arange(longest)[None, :] <= position[:, None]
        out = F.scaled_dot_product_attention(
            q.view(len(q), s.kv_heads, -1, s.head_dim),  # the group of a kv head as query rows
            self.keys[layer, slot, :, :longest],
            self.values[layer, slot, :, :longest],
            attn_mask=visible[:, None, None, :],
        )
        return out.reshape(len(q), -1)

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        if delta is not None:
            residual += delta
        x = residual.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return x.to(residual.dtype) * weight

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def _rotate(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cosine, sine = (t[position][:, None] for t in (self.shape.cosine, self.shape.sine))
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


class NativeRowOps:
    """AVX512-BF16 backend; one thread, so run one process per core."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._library = _compile(shape.head_dim, shape.heads // shape.kv_heads)
        size = (shape.layers, shape.slots, shape.kv_heads, shape.capacity * shape.head_dim)
        self.keys = torch.zeros(size, dtype=torch.bfloat16)
        self.values = torch.zeros(size, dtype=torch.bfloat16)

    def attend(
        self, layer: int, qkv: torch.Tensor, slot: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        s = self.shape
        qkv = qkv.contiguous()
        out = qkv.new_empty(len(qkv), s.heads * s.head_dim)
        self._library.attend(
            _address(qkv),
            _address(s.cosine),
            _address(s.sine),
            _address(self.keys[layer]),
            _address(self.values[layer]),
            _address(slot),
            _address(position),
            ctypes.c_int64(len(qkv)),
            ctypes.c_int64(s.kv_heads),
            ctypes.c_int64(s.capacity),
            _address(out),
        )
        return out

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(residual)
        rows, width = residual.shape
        self._library.add_norm(
            _address(residual),
            None if delta is None else _address(delta),
            _address(weight),
            ctypes.c_float(self.shape.norm_eps),
            ctypes.c_int64(rows),
            ctypes.c_int64(width),
            _address(out),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._library.silu_mul(
            _address(gate_up), ctypes.c_int64(rows), ctypes.c_int64(width // 2), _address(out)
        )
        return out

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        rows, width = logits.shape
        best = torch.empty(rows, dtype=torch.int64)
        self._library.argmax(
            _address(logits), ctypes.c_int64(rows), ctypes.c_int64(width), _address(best)
        )
        return best


def native_available() -> bool:
    """Whether this machine can compile and run `NativeRowOps`."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    except OSError:
        return False
    return "avx512_bf16" in flags and shutil.which("g++") is not None and _SOURCE.exists()


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _compile(head_dim: int, group: int) -> ctypes.CDLL:
    """Build the shared library once per source and sizes, in the user's cache directory."""
    if head_dim % 32:
        raise ValueError(f"head_dim: expected a multiple of 32, found {head_dim}")
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + f"{head_dim},{group}".encode()).hexdigest()[:16]
    library = CACHE_DIR.get() / "native" / f"rows_{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp-simd", "-shared", "-fPIC"]
            sizes = [f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"]
            subprocess.run(
                ["g++", "-std=c++17", *flags, *sizes, str(_SOURCE), "-o", str(built)], check=True
            )
            os.replace(built, library)
    return ctypes.CDLL(str(library))
