"""Bytes on one rank, term by term, and whether a load fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_ext.launcher.catalog import Hardware, Load
from sglang_ext.planner.draft import DraftShape
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.shape import BF16, Shape

MB, GB = 2.0**20, 2.0**30
LAYOUT_CHUNK = 8192


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. static: weights and KV, what `--mem-fraction-static` bounds."""

    weights: dict[str, float]
    kv: dict[str, float]
    reserve: dict[str, float]
    capacity: float

    @property
    def total(self) -> float:
        return sum(sum(part.values()) for part in (self.weights, self.kv, self.reserve))

    @property
    def static(self) -> float:
        return sum(self.weights.values()) + sum(self.kv.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    @property
    def smallest_fraction(self) -> float:
        """Below it, weights and this load's KV do not fit."""
        return self.static / self.capacity

    @property
    def largest_fraction(self) -> float:
        """Above it, activations, graphs and buffers do not fit."""
        return 1 - sum(self.reserve.values()) / self.capacity

    def terms(self) -> dict[str, float]:
        """All terms, bytes, largest first."""
        merged = {**self.weights, **self.kv, **self.reserve}
        return dict(sorted(merged.items(), key=lambda item: -item[1]))


def memory_of(
    shape: Shape, draft: DraftShape | None, layout: Layout, machine: Hardware, load: Load
) -> Memory:
    """What one rank holds when every request of the load has reached its full length."""
    requests = layout.requests_per_group(load.concurrency)
    tokens = requests * (load.input_tokens + load.output_tokens)
    return Memory(
        weights=_of_a_stage(_weights(shape, draft, layout), shape, layout),
        kv=_of_a_stage(_kv(shape, draft, layout, requests, tokens), shape, layout),
        reserve=_reserve(shape, layout, machine, requests),
        capacity=machine.gpu.memory,
    )


def _of_a_stage(terms: dict[str, float], shape: Shape, layout: Layout) -> dict[str, float]:
    """Terms of all layers, cut down to those of the largest pipeline stage.

    Embedding and head stand at both ends: one of the two on a rank, where they are not tied.
    """
    if layout.pp == 1:
        return terms
    share = -(-shape.layers // layout.pp) / shape.layers
    ends = 1.0 if shape.tied else 0.5
    return {n: v * (ends if n == "embedding and head" else share) for n, v in terms.items()}


def _weights(shape: Shape, draft: DraftShape | None, layout: Layout) -> dict[str, float]:
    attn_tp = layout.attn_tp
    whole_dense = layout.a2a == "deepep" and layout.dp > 1
    # DeepEP leaves the shared expert whole on every rank.
    shared_split = 1 if layout.a2a == "deepep" else layout.tp
    indexer = shape.indexer_params
    terms = {
        "attention weights": (shape.attention_per_rank(attn_tp) - indexer) * shape.linear,
        "embedding and head": shape.head_params * BF16 / attn_tp,
    }
    if indexer:
        terms["indexer weights"] = indexer * shape.linear
    if shape.dense_layers:
        split = 1 if whole_dense else attn_tp
        terms["dense MLP weights"] = shape.dense_layers * shape.dense * shape.linear / split
    if shape.moe_layers:
        one = shape.expert_params * shape.expert
        per_rank = shape.experts / layout.ep * one / layout.moe_tp
        terms["routed experts"] = shape.moe_layers * per_rank
        if shape.shared_params:
            shared = shape.moe_layers * shape.shared_params * shape.linear
            terms["shared expert"] = shared / shared_split
        if layout.redundant:
            terms["redundant experts"] = shape.moe_layers * layout.redundant / layout.ep * one
    if draft is not None and layout.algorithm:
        terms["draft weights"] = draft.shared_per_rank(attn_tp) + draft.routed / layout.tp
    return terms


def _kv(
    shape: Shape, draft: DraftShape | None, layout: Layout, requests: int, tokens: float
) -> dict[str, float]:
    terms: dict[str, float] = {}
    for kind in shape.kinds:
        shards = min(layout.attn_tp, kind.kv_shards)
        size = kind.count * (kind.kv_token * tokens + kind.kv_request * requests) / shards
        if own := kind.indexer:
            keys = kind.count * (own.kv_token * tokens + own.kv_request * requests) / shards
            terms["indexer keys"] = terms.get("indexer keys", 0.0) + keys
            size -= keys
        terms[f"KV of {kind.name} layers"] = size
    if draft is not None and layout.algorithm:
        shards = min(layout.attn_tp, draft.kv_shards)
        terms["draft KV"] = (draft.kv_token * tokens + draft.kv_request * requests) / shards
    return terms


def _reserve(shape: Shape, layout: Layout, machine: Hardware, requests: int) -> dict[str, float]:
    """SGLang 0.5.23's own reserve (its `mem_fraction_static` heuristic), and DeepEP's buffers."""
    if machine.gpu.is_cpu:
        return {"activations": 0.25 * GB}
    graph_rows = requests
    graphs = graph_rows * 2 * MB
    if layout.dp > 1:
        graphs += graph_rows * layout.dp * 3 * MB * (1.5 if graph_rows > 300 else 1)
    graphs += (1.5 * GB) if shape.family in ("v32", "v4") else 512 * MB
    activations = (512 + LAYOUT_CHUNK * 1.5 + layout.tp * layout.pp / 8 * 1024) * MB
    activations = max(activations, 10 * GB - graphs)
    terms = {"graphs": graphs, "activations": activations}
    if layout.a2a == "deepep":
        rows = max(128, requests * (layout.gamma + 1))
        # Two buffers, each for a dispatch and a combine of [experts, rows, hidden] in bf16.
        terms["DeepEP buffers"] = 4.0 * shape.experts * rows * shape.hidden * BF16
    return terms


@dataclass(frozen=True)
class Largest:
    """What would fit: the longest request at the asked concurrency, and the reverse."""

    tokens: int
    concurrency: int


def largest_that_fits(
    shape: Shape, draft: DraftShape | None, layout: Layout, machine: Hardware, load: Load
) -> Largest:
    """By bisection; 0 where nothing fits."""

    def fits(tokens: int, concurrency: int) -> bool:
        tried = Load(max(1, tokens - load.output_tokens), load.output_tokens, concurrency)
        return memory_of(shape, draft, layout, machine, tried).fits

    length = load.input_tokens + load.output_tokens
    longest = largest(lambda n: fits(n, load.concurrency), shape.longest)
    return Largest(
        longest if longest > load.output_tokens else 0,
        largest(lambda n: fits(length, n)),
    )


def largest(holds: Callable[[int], bool], most: int | None = None) -> int:
    """The last number, up to `most`, for which `holds`, which then never holds again."""
    low, high = 0, 1 if most is None else most + 1
    while most is None and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
