"""What DeepSeek-V4's sparse attention costs per decoded token as the context grows.

One query row of one CSA layer with the proportions of DeepSeek-V4-Flash (fewer heads, so that it
fits a laptop): the indexer scores every entry of the context, attention reads the window and the
selected entries only. Dense attention over all tokens runs beside it in the same loop. Before
anything is timed, the selection is compared with the naive reference.

    python -m bench.dsa_cost --out dsa_cost.json --plot dsa_cost.png
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

from bench.report import environment
from sglang_ext.kernels.indexer import select_entries
from sglang_ext.kernels.indexer.reference import select_entries_reference
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention
from sglang_ext.srt.cache.dsv4_pool import layer_buffers
from sglang_ext.srt.models.deepseek_v4_config import parse
from sglang_ext.tiny_model.deepseek_v4 import tiny_config

RATIO = 4


@dataclass(frozen=True)
class Shape:
    """Of one layer."""

    heads: int = 8
    dim: int = 512
    index_heads: int = 8
    index_dim: int = 128
    window: int = 128
    top_k: int = 512


@dataclass(frozen=True)
class Layer:
    """A decode step's inputs behind `context` tokens."""

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
        blocks = context // RATIO
        return cls(
            shape,
            context,
            q=torch.randn(1, shape.heads, shape.dim),
            index_q=torch.randn(1, 1, shape.index_heads, shape.index_dim),
            weights=torch.rand(1, 1, shape.index_heads),
            latents=torch.randn(context, shape.dim),
            entries=torch.randn(blocks, shape.dim),
            keys=torch.randn(blocks, shape.index_dim),
        )

    def select(self) -> Tensor:
        """[1, selected] entries."""
        blocks = torch.arange(len(self.keys))[None]
        visible = torch.tensor([[len(self.keys)]])
        args = (self.index_q, self.weights, self.keys, blocks, visible, self.shape.top_k)
        return select_entries(*args)[0]

    def sparse(self, chosen: Tensor) -> Tensor:
        first = max(self.context - self.shape.window, 0)
        window = torch.arange(first, self.context)[None]
        return self._attend(Rows(self.latents, window), Rows(self.entries, chosen))

    def dense(self) -> Tensor:
        return self._attend(Rows(self.latents, torch.arange(self.context)[None]))

    def _attend(self, *sources: Rows) -> Tensor:
        dim = self.shape.dim
        return sparse_attention(self.q, sources, sink=None, scale=dim**-0.5, value_dim=dim)


def check(shape: Shape) -> None:
    """Raise SystemExit unless the selection equals the naive one."""
    layer = Layer.random(shape, 4 * RATIO * shape.top_k)
    blocks = torch.arange(len(layer.keys))[None]
    visible = torch.tensor([[len(layer.keys)]])
    args = (layer.index_q, layer.weights, layer.keys, blocks, visible, shape.top_k)
    wanted = select_entries_reference(*args)[0]
    if not torch.equal(layer.select().sort().values, wanted.sort().values):
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
    """Bytes per token and buffer of each kind of layer, at page 1, bf16."""
    config = parse(tiny_config(head_dim=512, index_head_dim=128, qk_rope_head_dim=64))
    found = {}
    for ratio in (0, 4, 128):
        for buffer in layer_buffers(config, ratio, torch.bfloat16, 1):
            found[f"ratio {ratio}: {buffer.name}"] = buffer.bytes_per_token
    return found


def table(rows: list[dict[str, float]]) -> str:
    lines = ["| context | indexer, ms | attention, ms | dense attention, ms |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"{row[k]:.2f}" for k in ("indexer_ms", "sparse_ms", "dense_ms"))
        lines.append(f"| {row['context']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    contexts = [row["context"] for row in rows]
    for key, label in (
        ("indexer_ms", "indexer"),
        ("sparse_ms", "attention"),
        ("dense_ms", "dense"),
    ):
        axes.loglog(contexts, [row[key] for row in rows], marker="o", label=label)
    axes.set(xlabel="context, tokens", ylabel="ms per decoded token and layer")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**n for n in range(10, 17)])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("dsa_cost.json"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    shape = Shape()
    check(shape)
    rows = measure(shape, args.contexts, args.repeats)
    result = {"rows": rows, "bytes_per_token": memory(), "environment": environment(0.0)}
    args.out.write_text(json.dumps(result, indent=1))
    print(table(rows))
    print()
    for name, size in result["bytes_per_token"].items():
        print(f"{name}: {size:.0f} bytes per token")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
