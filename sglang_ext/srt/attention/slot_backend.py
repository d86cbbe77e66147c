"""What attention backends over a token pool of ours have in common.

All state belongs to token slots, so a backend plans each forward from the slot table alone and
needs no CUDA graph, no Triton and no translation of slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

if TYPE_CHECKING:
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

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
