"""A layer of experts under single-batch overlap, in the order of `core.overlap.exchanged`.

    SGLang on CUDA   shared experts behind a dispatch on one stream; combine on a second stream,
                     told by signals which blocks of the second linear are done
    here             the same order of issue; transfers travel by themselves, and rows go back in
                     parts
The difference absorbed here: signals. A block of experts computes, its rows leave, the next block
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglang_ext.core.dispatch import ExpertBlocks
from sglang_ext.core.overlap import exchanged
from sglang_ext.core.overlap_run import Recorder, perform
from sglang_ext.kernels.moe import (
    Activation,
    ExpertWeights,
    Routing,
    first_linear,
    second_linear,
)
from sglang_ext.srt.parallel.expert_exchange import Arrived, ExpertExchange
from sglang_ext.srt.parallel.return_parts import ReturnInParts

# Each part is a message of its own.
_PARTS = 2


@dataclass(frozen=True)
class OverlappedLayer:
    """One layer: its exchange, its experts on this rank, what stands between their linears.

    shared: rows [rows, H] -> [rows, H], whole; None where the layer has none
    weigh_input: as in `Routing`
    """

    exchange: ExpertExchange
    experts: ExpertWeights
    activation: Activation
    shared: Callable[[Tensor], Tensor] | None = None
    weigh_input: bool = False


def run_layer(
    layer: OverlappedLayer,
    begin: Callable[[Tensor, Any], Callable[[], Arrived]],
    x: Tensor,
    choice: Any,
    recorder: Recorder | None = None,
) -> Tensor:
    """x [rows, H] through the experts and the shared ones -> [rows, H], summed over ranks.

    begin: starts to send x with its `choice`; the call it returns waits for the rows of others.
    x is left as it is.
    """
    per_rank = layer.experts.w13.shape[0]
    blocks = ExpertBlocks(per_rank, min(_PARTS, per_rank))

    def dispatch_a(rows: Tensor, chosen: Any) -> Callable[[], ReturnInParts]:
        arrive = begin(rows, chosen)
        return lambda: ReturnInParts(layer.exchange.buffer, arrive(), blocks)

    def gate_up(way: ReturnInParts) -> Any:
        arrived = way.arrived
        routing = Routing(arrived.weights, arrived.ids, weigh_input=layer.weigh_input)
        return first_linear(arrived.hidden, layer.experts, routing, layer.activation)

    def down(part: int, way: ReturnInParts, inner: Any, sums: Tensor) -> tuple[Tensor, Tensor]:
        second_linear(inner, layer.experts, blocks.experts(part), sums)
        return sums, sums[way.rows(part)].to(x.dtype)

    def output(way: ReturnInParts, *back: Tensor) -> Tensor:
        routed = way.total(back[: blocks.parts])
        return routed if layer.shared is None else routed + back[-1]

    steps: dict[str, Callable[..., Any]] = {
        "dispatch_a": dispatch_a,
        "gate_up": gate_up,
        "down": down,
        "combine_a": lambda part, way, outputs: way.begin(part, outputs),
        "output": output,
    }
    if layer.shared is not None:
        steps["shared_experts"] = layer.shared
    buffers: dict[str, Any] = {"attended": x, "choices": choice}
    perform(exchanged(blocks.parts, shared=layer.shared is not None), steps, buffers, recorder)
    hidden: Tensor = buffers["hidden"]
    return hidden
