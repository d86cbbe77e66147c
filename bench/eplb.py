"""Expert load balance before and after EPLB on a skewed trace, as JSON and a plot.

Experts are chosen by Zipf popularity, in an order of its own for each layer. A placement is made
from the first half of the trace and judged on the second: what it earns in service, where loads
are those of the past. The published example must come out before anything is measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_ext.core.eplb import Placement, rebalance_experts, redundancy
from sglang_ext.core.eplb_transfer import doubled_on_a_gpu, plan_fetches, spread_copies

_EXAMPLE = torch.tensor([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]])
_EXAMPLE_SLOTS = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]]


def trace(layers: int, experts: int, tokens: int, top_k: int, skew: float, half: int) -> Tensor:
    """Tokens of each expert, [layers, experts]; popularity 1 / rank^skew in both halves."""
    popularity = 1.0 / np.arange(1, experts + 1) ** skew
    counts = []
    for layer in range(layers):
        order = np.random.default_rng(layer).permutation(experts)
        draws = np.random.default_rng((half, layer))
        # Gumbel top-k: k distinct experts per token, in proportion to popularity.
        keys = np.log(popularity) + draws.gumbel(size=(tokens, experts))
        chosen = order[np.argpartition(-keys, top_k, axis=1)[:, :top_k]]
        counts.append(np.bincount(chosen.ravel(), minlength=experts))
    return torch.from_numpy(np.stack(counts))


def trivial(layers: int, experts: int, replicas: int) -> Placement:
    """Slot p holds expert p mod E."""
    slots = torch.arange(replicas).remainder(experts).expand(layers, -1)
    copies = torch.stack([torch.bincount(row, minlength=experts) for row in slots])
    return Placement(slots, torch.empty(0, dtype=torch.int64), copies)


def spread(placed: Placement, load: Tensor, gpus: int, nodes: int) -> Placement:
    slots = spread_copies(placed.physical_to_logical, load / placed.copies, gpus, nodes)
    return Placement(slots, placed.logical_to_physical, placed.copies)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = (options.layers, options.experts, options.tokens, options.top_k, options.skew)
    past, future = (trace(*sizes, half=half) for half in (0, 1))
    replicas = options.experts + redundancy(options.experts + options.redundant, options.gpus)
    replicas += options.redundant
    start = trivial(options.layers, options.experts, replicas)
    rows = {"trivial": start}
    for name, groups, nodes in (
        ("global", 1, 1),
        ("hierarchical", options.groups, options.nodes),
    ):
        placed = rebalance_experts(past, replicas, groups, nodes, options.gpus)
        rows[name] = placed
        rows[f"{name}, spread"] = spread(placed, past, options.gpus, nodes)
    return {
        "sizes": {**vars(options), "out": str(options.out), "replicas": replicas},
        "placements": {
            name: summary(placed, past, future, start, options) for name, placed in rows.items()
        },
    }


def summary(
    placed: Placement, past: Tensor, future: Tensor, start: Placement, options: argparse.Namespace
) -> dict[str, Any]:
    gpus = options.gpus
    moved = plan_fetches(
        start.physical_to_logical, placed.physical_to_logical, gpus, gpus // options.nodes
    )
    return {
        "max_over_mean_planned": placed.imbalance(past, gpus).tolist(),
        "max_over_mean": placed.imbalance(future, gpus).tolist(),
        "doubled_slots": doubled_on_a_gpu(placed.physical_to_logical, gpus).tolist(),
        "fetched_from_other_gpus": sum(f.gpu != f.source_gpu for f in moved),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, row in result["placements"].items():
        axes.plot(sorted(row["max_over_mean"]), marker=".", label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="layer, by imbalance", ylabel="max / mean GPU load")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in each half of the trace")
    parser.add_argument("--skew", type=float, default=0.8, help="Zipf exponent")
    parser.add_argument("--redundant", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("eplb.json"), help="a .png goes beside it")
    options = parser.parse_args()
    example = rebalance_experts(_EXAMPLE, replicas=16, groups=4, nodes=2, gpus=8)
    if example.physical_to_logical.tolist() != _EXAMPLE_SLOTS:
        raise SystemExit("the published example does not come out: nothing is measured")
    result = measure(options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, options.out.with_suffix(".png"))
    for name, row in result["placements"].items():
        mean = sum(row["max_over_mean"]) / len(row["max_over_mean"])
        print(f"{name}: max / mean {mean:.3f}, doubled slots {sum(row['doubled_slots'])}")


if __name__ == "__main__":
    main()
