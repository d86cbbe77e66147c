"""Attention backend `portable`: SGLang's contract on top of kernels/attention.

    SGLang   init_forward_metadata(batch); forward(q, k, v, layer, batch, save_kv_cache, **kwargs)
    kernel   paged_attention(q, k_buffer, v_buffer, plan, spec, sinks)
The difference absorbed here: one plan per forward for all layers, the layer's attributes as an
`AttentionSpec`, and the write of the new keys and values into the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.kernels.attention import (
    AttentionPlan,
    AttentionSpec,
    BandMasks,
    PlanCosts,
    paged_attention,
)
from sglang_ext.srt.attention.portable_plan import branch_plan, build_plan, split_plan
from sglang_ext.srt.parallel.context import gather_rows, local_rows
from sglang_ext.srt.parallel.seen import note_gather

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# The width, in elements, of the key row that PlanCosts was measured with.
_MEASURED_WIDTH = 192


class PortableAttnBackend(AttentionBackend):
    """Dense attention (MHA, GQA, MLA latents) on any device that torch knows.

    Raises:
        NotImplementedError: a K/V pool in a layout other than one row per token slot.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = getattr(model_runner, "kv_index_translator", None)
        self.forward_metadata: AttentionPlan | None = None
        self._swa_plan: AttentionPlan | None = None
        self._split = False
        self._masks = BandMasks()
        self._specs: dict[RadixAttention, AttentionSpec] = {}
        self._costs = _costs_for(self.token_to_kv_pool)
        _check_pool(self.token_to_kv_pool, self.kv_index_translator)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the forward; every layer of it shares the plan."""
        note_gather(forward_batch)
        if forward_batch.forward_mode.is_idle():
            self.adopt_plan(None)
            return
        table = self.req_to_token_pool.req_to_token
        local = local_rows(forward_batch)
        if local is None:
            self.adopt_plan(build_plan(forward_batch, table, self._masks, self._costs))
            return
        self.adopt_plan(split_plan(forward_batch, table, local, self._masks, self._costs))
        self._split = True

    def adopt_plan(self, plan: AttentionPlan | None) -> None:
        """Use `plan` for the layers that follow."""
        self.forward_metadata = plan
        self._swa_plan = None
        # Whether context parallelism gives this rank only a part of the forward's rows.
        self._split = False

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[rows, query heads * dim] -> [rows, query heads * value dim], in every mode.

        Raises:
            NotImplementedError: cross attention, or an extra input other than sinks and the
                rotary halves of q and k.
        """
        width = layer.tp_q_head_num * layer.v_head_dim
        plan = self.forward_metadata
        if plan is None or forward_batch.forward_mode.is_idle():
            return q.new_zeros(q.shape[0], width)
        sinks = None
        if kwargs:
            sinks = kwargs.pop("sinks", None)
            q, k = _join_rotary(q, k, layer, kwargs)
            _refuse_inputs(layer, kwargs)
        spec = self._specs.get(layer) or self._remember_spec(layer)
        if save_kv_cache and k is not None and v is not None:
            if self._split:
                k, v = _gather(k, v, forward_batch)
            self._save(layer, forward_batch, k, v)
        pool = self.token_to_kv_pool
        out = paged_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self._over_pool(plan, layer),
            spec,
            sinks,
        )
        return out.view(-1, width)

    forward_extend = forward
    forward_decode = forward
    forward_mixed = forward

    def _remember_spec(self, layer: RadixAttention) -> AttentionSpec:
        spec = self._specs[layer] = layer_spec(layer)
        return spec

    def _over_pool(self, plan: AttentionPlan, layer: RadixAttention) -> AttentionPlan:
        """The plan in the slots of the sub-pool that holds this layer."""
        if not _in_swa_pool(self.token_to_kv_pool, layer.layer_id):
            return plan
        if self._swa_plan is None:
            self._swa_plan = plan.with_slots(self.token_to_kv_pool.translate_loc_from_full_to_swa)
        return self._swa_plan

    def _save(
        self, layer: RadixAttention, batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pool, loc = self.token_to_kv_pool, batch.out_cache_loc
        if not _is_plain(pool) or k.dtype != pool.store_dtype:
            self._save_through_pool(layer, batch, k, v)
            return
        index = layer.layer_id - pool.start_layer
        pool.k_buffer[index].index_copy_(0, loc, k)
        pool.v_buffer[index].index_copy_(0, loc, v)

    def _save_through_pool(
        self, layer: RadixAttention, batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pool = self.token_to_kv_pool
        swa = None
        if _in_swa_pool(pool, layer.layer_id):
            swa = pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        loc = KVWriteLoc.for_batch(batch, swa_loc=swa)
        if layer.k_scale_float is None or k.dtype == pool.dtype:
            pool.set_kv_buffer(layer, loc, k, v)
        else:
            # The pool divides by the scales in place.
            scales = (layer.k_scale_float, layer.v_scale_float)
            pool.set_kv_buffer(layer, loc, k.clone(), v.clone(), *scales)


class PortableMultiStepDraftBackend:
    """One backend per step of an autoregressive draft (EAGLE, EAGLE3, NEXTN, STANDALONE)."""

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.device = model_runner.device
        self.page_size = model_runner.page_size
        self.attn_backends = [
            PortableAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan every step at once, before the first of them runs."""
        for step, backend in enumerate(self.attn_backends):
            plan = branch_plan(
                forward_batch,
                backend.req_to_token_pool.req_to_token,
                step,
                topk=self.topk,
                num_steps=self.speculative_num_steps,
                page_size=self.page_size,
                masks=backend._masks,
                costs=backend._costs,
            )
            backend.adopt_plan(plan)


def layer_spec(layer: RadixAttention) -> AttentionSpec:
    """The layer's attributes; SGLang's window already excludes the row itself.

    Raises:
        NotImplementedError: cross attention, or a temperature that grows with the position.
    """
    if layer.is_cross_attention:
        raise _unsupported(layer, "cross attention")
    if layer.xai_temperature_len > 0:
        raise _unsupported(layer, "xai_temperature_len")
    window = layer.sliding_window_size
    return AttentionSpec(
        scale=layer.scaling,
        causal=layer.attn_type == AttentionType.DECODER,
        window=-1 if window is None or window < 0 else window,
        logit_cap=layer.logit_cap or 0.0,
        k_scale=layer.k_scale_float or 1.0,
        v_scale=layer.v_scale_float or 1.0,
    )


def _gather(
    k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's keys and values [rows, heads, dim] -> those of all CP ranks, one collective."""
    both = gather_rows(torch.cat((k, v), dim=-1), batch)
    whole_k, whole_v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    return whole_k, whole_v


def _join_rotary(
    q: torch.Tensor, k: torch.Tensor | None, layer: RadixAttention, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latent attention hands over the rotary parts separately; the pool stores them last."""
    q_rope, k_rope = kwargs.pop("q_rope", None), kwargs.pop("k_rope", None)
    if q_rope is not None:
        nope = q.reshape(q.shape[0], layer.tp_q_head_num, -1)
        q = torch.cat([nope, q_rope.view(q.shape[0], layer.tp_q_head_num, -1)], -1)
    if k is not None and k_rope is not None:
        k = torch.cat([k, k_rope.view(k.shape[0], k.shape[1], -1)], -1)
    return q, k


def _refuse_inputs(layer: RadixAttention, kwargs: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in kwargs.items() if value is not None)
    if unknown:
        raise _unsupported(layer, ", ".join(unknown))


def _unsupported(layer: RadixAttention, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"layer {layer.layer_id}: {what}: expected plain self-attention with at most sinks; the "
        f"attention backend 'portable' cannot do this, choose another --attention-backend"
    )


def _check_pool(pool: Any, translator: Any) -> None:
    if getattr(translator, "is_translating", False):
        raise NotImplementedError(
            "the attention backend 'portable' cannot read a unified K/V pool; "
            "leave the unified memory pool off"
        )
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise NotImplementedError(
            f"kv_cache_layout: the attention backend 'portable' expects 'nhd', found {layout!r}"
        )


def _costs_for(pool: Any) -> PlanCosts:
    width = getattr(pool, "row_dim", None) or _MEASURED_WIDTH
    measured = PlanCosts()
    return PlanCosts(call=measured.call * _MEASURED_WIDTH / width)


def _in_swa_pool(pool: Any, layer_id: int) -> bool:
    return isinstance(pool, SWAKVPool) and bool(pool.layers_mapping[layer_id][1])


def _is_plain(pool: Any) -> bool:
    """Whether writing the pool's buffers directly does what its own method would do."""
    kind = type(pool)
    return (
        isinstance(pool, MHATokenToKVPool)
        and kind.set_kv_buffer is MHATokenToKVPool.set_kv_buffer
        and kind._store_kv_layer is MHATokenToKVPool._store_kv_layer
        and not pool.is_quantized_kv_cache
        and pool.store_dtype == pool.dtype
    )
