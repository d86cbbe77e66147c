"""What the sparse attention of DeepSeek-V4 and V3.2 costs per decoded token as the context grows.

One query row of one layer with the proportions of the published models (fewer heads, so that it
fits a laptop). The indexer scores everything: V4-Flash's entries of 4 tokens in a CSA layer, every
token in V3.2. Attention reads what is selected, in V4 beside the window. Dense attention over all
tokens runs beside it in the same loop. Before anything is timed, the selection is compared with
the naive reference.

    python -m bench.dsa_cost --out dsa_cost.json --plot dsa_cost.png

Whole decode steps of a served model: `bench.dsa_decode`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.panels import over_context
from bench.report import environment
from sglang_ext.kernels.indexer import select_entries
from sglang_ext.kernels.indexer.reference import select_entries_reference
from sglang_ext.kernels.indexer_v32 import select_tokens
from sglang_ext.kernels.indexer_v32.reference import select_tokens_reference
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention
from sglang_ext.srt.cache import dsa_pool, dsv4_pool
from sglang_ext.srt.models import deepseek_v4_config, deepseek_v32_config
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32


@dataclass(frozen=True)
class Shape:
    """Of one layer.

    ratio: tokens per entry that the indexer scores. dim: of a cached row; its first `value_dim`
    are the value. window: tokens read beside what is selected.
    """

    ratio: int
    dim: int
    value_dim: int
    window: int
    top_k: int
    heads: int = 8
    index_heads: int = 8
    index_dim: int = 128


SHAPES = {
    "DeepSeek-V4, CSA layer": Shape(ratio=4, dim=512, value_dim=512, window=128, top_k=512),
    "DeepSeek-V3.2": Shape(ratio=1, dim=576, value_dim=512, window=0, top_k=2048),
}


@dataclass(frozen=True)
class Layer:
    """A decode step's inputs behind `context` tokens.

    entries: what selected numbers name: pooled rows, or the latents themselves.
    """

    shape: Shape
    context: int
    q: Tensor
    index_q: Tensor
    weights: Tensor
    latents: Tensor
    entries: Tensor
    keys: Tensor

    @classmethod
    def random(cls, shape: Shape, context: int) -> Layer:
        torch.manual_seed(context)
        blocks = context // shape.ratio
        latents = torch.randn(context, shape.dim)
        return cls(
            shape,
            context,
            q=torch.randn(1, shape.heads, shape.dim),
            index_q=torch.randn(1, 1, shape.index_heads, shape.index_dim),
            weights=torch.rand(1, 1, shape.index_heads),
            latents=latents,
            entries=latents if shape.ratio == 1 else torch.randn(blocks, shape.dim),
            keys=torch.randn(blocks, shape.index_dim),
        )

    def select(self, *, naive: bool = False) -> Tensor:
        """[1, selected] entries."""
        count = len(self.keys)
        visible, top_k = torch.tensor([[count]]), self.shape.top_k
        if self.shape.ratio == 1:
            tokens = select_tokens_reference if naive else select_tokens
            return tokens(self.index_q, self.weights, self.keys[None], visible, top_k)[0]
        entries = select_entries_reference if naive else select_entries
        slots = torch.arange(count)[None]
        return entries(self.index_q, self.weights, self.keys, slots, visible, top_k)[0]

    def sparse(self, chosen: Tensor) -> Tensor:
        selected = Rows(self.entries, chosen)
        if not self.shape.window:
            return self._attend(selected)
        window = torch.arange(max(self.context - self.shape.window, 0), self.context)[None]
        return self._attend(Rows(self.latents, window), selected)

    def dense(self) -> Tensor:
        return self._attend(Rows(self.latents, torch.arange(self.context)[None]))

    def _attend(self, *sources: Rows) -> Tensor:
        scale = self.shape.dim**-0.5
        return sparse_attention(
            self.q, sources, sink=None, scale=scale, value_dim=self.shape.value_dim
        )


def check(shape: Shape) -> None:
    """Raise SystemExit unless the selection equals the naive one."""
    layer = Layer.random(shape, 4 * shape.ratio * shape.top_k)
    found, wanted = layer.select(), layer.select(naive=True)
    if not torch.equal(found.sort().values, wanted.sort().values):
        raise SystemExit("selection: expected the naive reference's, found another")


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    step()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def measure(shape: Shape, contexts: list[int], repeats: int) -> list[dict[str, float]]:
    rows = []
    for context in contexts:
        layer = Layer.random(shape, context)
        chosen = layer.select()
        rows.append(
            {
                "context": context,
                "indexer_ms": milliseconds(layer.select, repeats),
                "sparse_ms": milliseconds(lambda c=chosen, x=layer: x.sparse(c), repeats),
                "dense_ms": milliseconds(layer.dense, repeats),
            }
        )
    return rows


def memory() -> dict[str, float]:
    """Bytes per token of each kind of layer and buffer, at page 1, bf16; what the pools allocate.

    That they allocate as much is held by the 300-step tests of tests/oracle.
    """
    v4 = deepseek_v4_config.parse(
        deepseek_v4.tiny_config(head_dim=512, index_head_dim=128, qk_rope_head_dim=64)
    )
    found: dict[str, float] = {}
    for ratio in (0, 4, 128):
        for buffer in dsv4_pool.layer_buffers(v4, ratio, torch.bfloat16, 1):
            found[f"DeepSeek-V4, ratio {ratio}: {buffer.name}"] = buffer.bytes_per_token
    v32 = deepseek_v32_config.parse(
        deepseek_v32.tiny_config(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    )
    found["DeepSeek-V3.2: latent and index key"] = dsa_pool.bytes_per_token(v32, 1, torch.bfloat16)
    return found


def table(rows: list[dict[str, float]]) -> str:
    lines = ["| context | indexer, ms | attention, ms | dense attention, ms |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"{row[k]:.2f}" for k in ("indexer_ms", "sparse_ms", "dense_ms"))
        lines.append(f"| {row['context']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    labels = {"indexer_ms": "indexer", "sparse_ms": "attention", "dense_ms": "dense"}
    panels = {
        title: (
            [row["context"] for row in rows],
            {label: [row[key] for row in rows] for key, label in labels.items()},
        )
        for title, rows in found.items()
    }
    over_context(panels, "ms per decoded token and layer", path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**n for n in range(10, 17)])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("dsa_cost.json"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = {}
    for title, shape in SHAPES.items():
        check(shape)
        found[title] = measure(shape, args.contexts, args.repeats)
        print(f"{title}\n\n{table(found[title])}\n")
    result = {"rows": found, "bytes_per_token": memory(), "environment": environment(0.0)}
    args.out.write_text(json.dumps(result, indent=1))
    for name, size in memory().items():
        print(f"{name}: {size:.0f} bytes per token")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
