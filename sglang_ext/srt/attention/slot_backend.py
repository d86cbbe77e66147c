"""What attention backends over a token pool of ours have in common.

All state belongs to token slots, so a backend plans each forward from the slot table alone and
needs no CUDA graph, no Triton and no translation of slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_ext.srt.attention.dsa_plan import Span, chain_spans, spans_of, split_spans
from sglang_ext.srt.parallel.context import gather_rows, local_rows
from sglang_ext.srt.parallel.seen import note_gather

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class SlotBackend(AttentionBackend):
    """Base of a model's own backend; `title` names the model, `pool_type` its pool.

    Raises:
        NotImplementedError: a pool of another layout, or slots that need translation.
    """

    title: str
    pool_type: type

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self._split = False
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool: Any = model_runner.token_to_kv_pool
        self.kv_index_translator = getattr(model_runner, "kv_index_translator", None)
        if getattr(self.kv_index_translator, "is_translating", False):
            raise NotImplementedError(
                f"unified memory pool: expected off with {self.title} on this package, found on; "
                "leave it off"
            )
        if not isinstance(self.token_to_kv_pool, self.pool_type):
            raise NotImplementedError(
                f"token pool: expected {self.pool_type.__name__} for {self.title}, found "
                f"{type(self.token_to_kv_pool).__name__}"
            )

    @abstractmethod
    def plan(self, spans: list[Span], own: list[Span] | None = None) -> None:
        """Prepare for a forward of these rows; every layer of it shares the plan.

        own: those of this rank, where context parallelism leaves it a part of them.
        """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        note_gather(forward_batch)
        idle = forward_batch.forward_mode.is_idle()
        local = None if idle else local_rows(forward_batch)
        self._split = local is not None
        spans = [] if idle else spans_of(forward_batch)
        self.plan(spans, None if local is None else split_spans(forward_batch, local))

    def whole(self, rows: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """This rank's rows [rows, ...] of a forward -> all of them, in order."""
        return gather_rows(rows, forward_batch) if self._split else rows

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False


class SlotChainBackend:
    """One backend per step of a chain that an autoregressive draft extends, one row a request."""

    def __init__(
        self, backend: Callable[[ModelRunner], SlotBackend], model_runner: ModelRunner, steps: int
    ) -> None:
        # The first token of a chain comes from the forward over what was accepted.
        self.attn_backends = [backend(model_runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan every step at once, before the first of them runs."""
        for step, backend in enumerate(self.attn_backends):
            backend.plan(chain_spans(forward_batch, step))
