"""SGLang's MoE layer under single-batch overlap, off CUDA.

    SGLang  FusedMoE.forward(x, choice): dispatch, experts, combine; a model that overlaps hangs
            hooks on the dispatcher, around streams and signals
    here    the same call follows `single_batch.run_layer`; a model hands over its shared experts
The difference absorbed here: the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import Tensor

from sglang_ext.srt.moe import activation_of, weights_of
from sglang_ext.srt.parallel.seen import note
from sglang_ext.srt.parallel.single_batch import OverlappedLayer, run_layer


class OverlappedExperts(FusedMoE):
    """Experts whose exchange is overlapped within one batch.

    Raises:
        NotImplementedError: quantised experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.quant_method, UnquantizedFusedMoEMethod):
            raise NotImplementedError(
                "--enable-single-batch-overlap: expected experts without quantisation on a CPU, "
                f"found {type(self.quant_method).__name__}. Leave the flag out."
            )

    def forward(self, hidden_states: Tensor, topk_output: Any, pre_quant_input: Any = None) -> Any:
        return self.with_shared(hidden_states, topk_output, None)

    def with_shared(
        self, x: Tensor, choice: Any, shared: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]: routed experts, and `shared`, which runs beside the
        dispatch; x is left as it is."""
        dispatcher: Any = self.dispatcher
        config = self.moe_runner_config
        layer = OverlappedLayer(
            dispatcher.exchange,
            weights_of(self),
            activation_of(config),
            shared,
            weigh_input=config.apply_router_weight_on_input,
        )
        out = run_layer(layer, dispatcher.begin, x, choice)
        dispatcher.count()
        note("way back of expert rows in parts")
        if shared is not None:
            note("shared experts while rows travel")
        return out
