"""DeepSeek Sparse Attention: SGLang's contract over the indexer and latent attention.

    SGLang   init_forward_metadata(batch); forward(q, None, None, layer, batch, dsa=DsaInputs)
    kernels  select_tokens(...); attend_visible / attend_expanded / sparse_attention
Three ways to the same sum, by what is cheapest:
    all tokens of the request fit in top_k, many rows    keys and values expanded, dense and causal
    all fit, few rows                                    absorbed queries over the latents
    more tokens than top_k                               absorbed, over what the indexer selects
Every new token's latent and index key are written first, whichever way is taken: a later row
of a longer context selects among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_ext.kernels.indexer_v32 import select_tokens
from sglang_ext.kernels.latent_attention import attend_expanded, attend_visible
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention
from sglang_ext.srt.attention.dsa_inputs import DsaInputs
from sglang_ext.srt.attention.dsa_plan import RowGroup, Span, group
from sglang_ext.srt.attention.slot_backend import SlotBackend
from sglang_ext.srt.cache.dsa_pool import DsaTokenPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DsaAttnBackend(SlotBackend):
    """Attention of a DeepSeek-V3.2 target, in every mode SGLang runs.

    Raises:
        NotImplementedError: a pool of another layout, or slots that need translation.
    """

    title = "DeepSeek-V3.2"
    pool_type = DsaTokenPool

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.forward_metadata: list[RowGroup] = []
        # Selections of the last layer that kept its own, by group.
        self._kept: dict[int, Tensor] = {}

    def plan(self, spans: list[Span], own: list[Span] | None = None) -> None:
        self._kept = {}
        rows = spans if own is None else own
        self.forward_metadata = group(rows, self.req_to_token_pool.req_to_token)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        dsa: DsaInputs,
    ) -> Tensor:
        """[rows, heads * (nope + rope)] -> [rows, heads * value dim]; padding rows are zero."""
        heads, width = layer.tp_q_head_num, layer.v_head_dim
        out = q.new_zeros(q.shape[0], heads, width)
        if forward_batch.forward_mode.is_idle():
            return out.flatten(1)
        pool = self.token_to_kv_pool
        if save_kv_cache:
            slots = forward_batch.out_cache_loc
            new = slots.shape[0]
            latent = self.whole(dsa.latent, forward_batch)[:new]
            key = self.whole(dsa.index_key, forward_batch)[:new]
            pool.write(layer.layer_id, slots, latent, key)
        call = _LayerCall(
            q=q.view(-1, heads, layer.qk_head_dim),
            inputs=dsa,
            latents=pool.latents(layer.layer_id),
            index_keys=pool.index_keys(layer.layer_id),
            scale=layer.scaling,
            selections=self._kept,
        )
        for number, rows in enumerate(self.forward_metadata):
            real = rows.visible > 0
            out[rows.rows[real]] = call.attend(number, rows)[real].to(out.dtype)
        return out.flatten(1)

    forward_extend = forward
    forward_decode = forward
    forward_mixed = forward


@dataclass
class _LayerCall:
    """One layer of one forward.

    q: [rows, heads, nope + rope], rotated. latents, index_keys: the layer's pool rows.
    selections: by group, kept between layers that share one.
    """

    q: Tensor
    inputs: DsaInputs
    latents: Tensor
    index_keys: Tensor
    scale: float
    selections: dict[int, Tensor]
    _query: tuple[Tensor, Tensor] | None = None

    def attend(self, number: int, rows: RowGroup) -> Tensor:
        """[requests, width, heads, value dim] of one group."""
        up, q = self.inputs.up, self.q[rows.rows]
        batch, width, heads, _ = q.shape
        rope, latent = q.shape[-1] - up.nope, up.weight.shape[-1]
        fits = rows.tokens <= self.inputs.top_k
        if fits and rows.first is not None and up.expanding_pays(width, rows.tokens, rope):
            keys, values = up.expand(self.latents[rows.slots[0]])
            return attend_expanded(q[0], keys, values, rows.first, self.scale).unsqueeze(0)
        absorbed = up.absorb(q.flatten(0, 1))
        if fits:
            cached = self.latents[rows.slots]
            absorbed = absorbed.view(batch, width, heads, -1)
            out = attend_visible(absorbed, cached, rows.visible, latent, self.scale).flatten(0, 1)
        else:
            slots = self._selected_slots(number, rows).flatten(0, 1)
            out = sparse_attention(
                absorbed,
                (Rows(self.latents, slots),),
                sink=None,
                scale=self.scale,
                value_dim=latent,
            )
        return up.values(out).reshape(batch, width, heads, -1)

    def _selected_slots(self, number: int, rows: RowGroup) -> Tensor:
        """[requests, width, top_k] pool rows, -1 where a row has fewer tokens."""
        if self.inputs.reuses_selection and number in self.selections:
            return self.selections[number]
        if self._query is None:
            self._query = self.inputs.index_query()
        q, weights = self._query
        keys = self.index_keys[rows.slots]
        chosen = select_tokens(
            q[rows.rows], weights[rows.rows], keys, rows.visible, self.inputs.top_k
        )
        slots = rows.slots.gather(1, chosen.clamp(min=0).flatten(1)).view_as(chosen)
        slots = torch.where(chosen < 0, -1, slots)
        if self.inputs.keeps_selection:
            self.selections[number] = slots
        return slots
