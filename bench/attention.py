"""Time of one attention layer per mode, as JSON, against SGLang's torch_native backend.

Both backends are first held against the naive fp32 reference; nothing is timed if one is off. The
stock backend has no verify, so its verify is read as a chunked extend over the same rows. Every
ratio comes from alternating calls inside one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_ext.kernels.attention.reference import reference_attention
from sglang_ext.srt.attention.portable import PortableAttnBackend, layer_spec

# SmolLM2-135M.
HEADS, KV_HEADS, DIM = 9, 3, 64


@dataclass(frozen=True)
class Shape:
    """rows new tokens on top of prefixes cached ones, per request.

    contiguous: whether each request's slots follow each other in the pool.
    """

    name: str
    mode: str
    prefixes: tuple[int, ...]
    rows: tuple[int, ...]
    contiguous: bool


def shapes() -> list[Shape]:
    found = []
    for context in (100, 500, 1000, 2000):
        for contiguous in (True, False):
            place = "view" if contiguous else "gather"
            for rows in (1, 2, 4, 8):
                mode = "decode" if rows == 1 else "verify"
                name = f"{mode} {rows} x {context} {place}"
                found.append(Shape(name, mode, (context - rows,), (rows,), contiguous))
    ragged = tuple(100 + 37 * i for i in range(16))
    found.append(Shape("decode 16 ragged", "decode", ragged, (1,) * 16, False))
    found.append(Shape("verify 16 ragged x 4", "verify", ragged, (4,) * 16, False))
    lens = tuple(1 + i % 8 for i in range(16))
    found.append(Shape("verify 16 ragged x 1..8", "verify", ragged, lens, False))
    found.append(Shape("extend 512", "extend", (0,), (512,), True))
    found.append(Shape("extend 2048", "extend", (0,), (2048,), True))
    found.append(Shape("extend 512 after 1024", "extend", (1024,), (512,), True))
    found.append(Shape("extend 16 ragged", "extend", (0,) * 16, tuple(range(20, 100, 5)), False))
    return found


class Setup:
    """A filled pool, a batch and both backends for one shape."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        keys = [p + r for p, r in zip(shape.prefixes, shape.rows, strict=True)]
        slots = sum(keys)
        self.shape, self.keys = shape, keys
        self.pool = MHATokenToKVPool(
            slots + 8,
            1,
            dtype=dtype,
            head_num=KV_HEADS,
            head_dim=DIM,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in (self.pool.k_buffer[0], self.pool.v_buffer[0]):
            buffer.copy_(torch.randn(buffer.shape))
        table = ReqToTokenPool(len(keys) + 1, max(keys) + 1, "cpu", enable_memory_saver=False)
        order = torch.arange(slots) if shape.contiguous else torch.randperm(slots)
        first = 0
        for request, length in enumerate(keys):
            table.req_to_token[request + 1, :length] = order[first : first + length] + 1
            first += length
        self.table = table.req_to_token
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=table, token_to_kv_pool=self.pool, page_size=1
        )
        self.portable, self.native = PortableAttnBackend(runner), TorchNativeAttnBackend(runner)
        self.layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0)
        total = sum(shape.rows)
        self.q = torch.randn(total, HEADS * DIM).to(dtype)
        self.k, self.v = torch.randn(2, total, KV_HEADS, DIM).to(dtype)
        self.ours, self.stock = self._batch(shape.mode), self._batch("extend")
        if shape.mode == "decode":
            self.stock = self.ours

    def _batch(self, mode: str) -> ForwardBatch:
        shape = self.shape
        write = [
            self.table[r + 1, p : p + n]
            for r, (p, n) in enumerate(zip(shape.prefixes, shape.rows, strict=True))
        ]
        lengths = list(shape.prefixes) if mode == "verify" else self.keys
        modes = {
            "decode": ForwardMode.DECODE,
            "verify": ForwardMode.TARGET_VERIFY,
            "extend": ForwardMode.EXTEND,
        }
        return ForwardBatch(
            forward_mode=modes[mode],
            batch_size=len(lengths),
            input_ids=torch.zeros(sum(shape.rows), dtype=torch.int64),
            req_pool_indices=torch.arange(1, len(lengths) + 1),
            seq_lens=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            out_cache_loc=torch.cat(write).long(),
            extend_seq_lens=torch.tensor(shape.rows),
            extend_seq_lens_cpu=list(shape.rows),
            extend_prefix_lens=torch.tensor(shape.prefixes),
            spec_info=SimpleNamespace(verify_lens=list(shape.rows), custom_mask=None),
        )

    def run_portable(self) -> torch.Tensor:
        return self.portable.forward(self.q, self.k, self.v, self.layer, self.ours)

    def run_native(self) -> torch.Tensor:
        return self.native.forward(self.q, self.k, self.v, self.layer, self.stock)

    def plan(self) -> None:
        self.portable.init_forward_metadata(self.ours)
        self.portable.forward_metadata.groups(-1)

    def error(self, out: torch.Tensor) -> float:
        want = reference_attention(
            self.q.view(-1, HEADS, DIM),
            self.pool.k_buffer[0],
            self.pool.v_buffer[0],
            self.table[1:].long(),
            self.keys,
            self.shape.rows,
            layer_spec(self.layer),
        )
        return float((out.view(want.shape).float() - want).abs().max())


def medians_us(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Median of each call, the calls taking turns for `seconds`."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, seen in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seen.append(time.perf_counter() - start)
    return [1e6 * statistics.median(seen[len(seen) // 10 :]) for seen in times]


def measure(shape: Shape, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    setup = Setup(shape, dtype)
    setup.plan()
    setup.native.init_forward_metadata(setup.stock)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    errors = [setup.error(setup.run_portable()), setup.error(setup.run_native())]
    if max(errors) > limit:
        raise SystemExit(f"{shape.name}: expected errors below {limit}, found {errors}")
    ours, stock, plan = medians_us([setup.run_portable, setup.run_native, setup.plan], seconds)
    return {
        **asdict(shape),
        "portable_us": round(ours, 1),
        "torch_native_us": round(stock, 1),
        "speedup": round(stock / ours, 2),
        "plan_us_per_forward": round(plan, 1),
        "max_error": errors[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--only", default="", help="part of a shape's name")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    rows = [measure(s, dtype, args.seconds) for s in shapes() if args.only in s.name]
    print(json.dumps({"threads": args.threads, "dtype": args.dtype, "shapes": rows}, indent=1))


if __name__ == "__main__":
    main()
