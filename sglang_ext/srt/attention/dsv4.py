"""DeepSeek-V4's attention: SGLang's contract over compressor, indexer and sparse attention.

    SGLang   init_forward_metadata(batch); forward(q, None, None, layer, batch, v4=Dsv4Inputs)
    kernels  compress_blocks(...), select_entries(...), sparse_attention(...)
A layer's call has three steps, in this order and without exception:
    write     the new tokens' latents and compressor inputs
    compress  every block that ends with a token just written, though an entry may be there: it
              may be of a rejected draft, or of another request's tokens
    attend    the window, and the entries a row sees
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_ext.core.compress import visible_entries
from sglang_ext.kernels.compress import compress_blocks
from sglang_ext.kernels.indexer import select_entries
from sglang_ext.kernels.sparse_attention import Rows, sparse_attention
from sglang_ext.srt.attention.dsa_plan import Span
from sglang_ext.srt.attention.dsv4_inputs import Dsv4Inputs, NewRows
from sglang_ext.srt.attention.row_map import Piece, RowMap, row_map
from sglang_ext.srt.attention.slot_backend import SlotBackend
from sglang_ext.srt.cache.dsv4_pool import Dsv4TokenPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class Dsv4AttnBackend(SlotBackend):
    """Attention of a DeepSeek-V4 target, in every mode SGLang runs.

    Raises:
        NotImplementedError: a pool of another layout, or slots that need translation.
    """

    title = "DeepSeek-V4"
    pool_type = Dsv4TokenPool

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.forward_metadata = RowMap((), {})
        # Selections of the last layer that kept its own, by piece.
        self._kept: dict[int, Tensor] = {}

    def plan(self, spans: list[Span], own: list[Span] | None = None) -> None:
        self._kept = {}
        pool = self.token_to_kv_pool
        self.forward_metadata = row_map(
            spans,
            self.req_to_token_pool.req_to_token,
            window=pool.facts.sliding_window,
            ratios=tuple(sorted(set(pool.ratios))),
            own=own,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        v4: Dsv4Inputs,
    ) -> Tensor:
        """q [rows, heads * dim], rotated -> the same shape, still rotated; padding rows are 0."""
        heads, dim = layer.tp_q_head_num, layer.head_dim
        q = q.view(-1, heads, dim)
        out = torch.zeros_like(q)
        # The plan of a half without rows is an earlier forward's.
        if not len(q) or forward_batch.forward_mode.is_idle() or not self.forward_metadata.pieces:
            return out.flatten(1)
        pool = self.token_to_kv_pool
        inputs = v4.with_rows(lambda rows: self.whole(rows, forward_batch)) if self._split else v4
        call = _LayerCall(pool, pool.layer(layer.layer_id), inputs, self._kept)
        if save_kv_cache:
            call.write(forward_batch.out_cache_loc)
            call.compress(self.forward_metadata)
        for number, piece in enumerate(self.forward_metadata.pieces):
            rows = piece.group.rows[piece.real]
            out[rows] = call.attend(q[rows], number, piece, layer.scaling)
        return out.flatten(1)

    forward_extend = forward
    forward_decode = forward
    forward_mixed = forward


@dataclass(frozen=True)
class _LayerCall:
    """One layer of one forward.

    rows: the layer's buffers by name. selections: by piece, kept between layers that share one.
    """

    pool: Dsv4TokenPool
    rows: dict[str, Tensor]
    inputs: Dsv4Inputs
    selections: dict[int, Tensor]

    def write(self, slots: Tensor) -> None:
        new, inputs = len(slots), self.inputs
        latents = self.rows["latent"]
        latents.index_copy_(0, slots, inputs.latent[:new].to(latents.dtype))
        if inputs.new is not None:
            self.rows["raw"].index_copy_(0, slots, inputs.new.raw[:new])
        if inputs.index is not None:
            self.rows["index_raw"].index_copy_(0, slots, inputs.index.new.raw[:new])

    def compress(self, mapped: RowMap) -> None:
        if self.inputs.new is not None:
            self._compress(mapped, self.inputs.new, "raw", "entry")
        if self.inputs.index is not None:
            self._compress(mapped, self.inputs.index.new, "index_raw", "index_key")

    def _compress(self, mapped: RowMap, new: NewRows, source: str, target: str) -> None:
        ratio, blocks = self.inputs.ratio, mapped.blocks[self.inputs.ratio]
        if not len(blocks.last):
            return
        cos, sin = self.inputs.angles(blocks.first)
        entries = compress_blocks(
            self.rows[source], blocks.members, new.norm, self.inputs.eps, cos, sin, ratio=ratio
        )
        kept = self.rows[target]
        kept[self.pool.entry_rows(blocks.last, ratio)] = entries.to(kept.dtype)

    @cached_property
    def _index_query(self) -> tuple[Tensor, Tensor] | None:
        return None if self.inputs.index is None else self.inputs.index.query()

    def attend(self, q: Tensor, number: int, piece: Piece, scale: float) -> Tensor:
        """q [real rows of the piece, heads, dim] -> the same shape."""
        sources = [Rows(self.rows["latent"], piece.real_window_slots)]
        if self.inputs.ratio:
            index = self._entry_rows(number, piece)
            if index.shape[-1]:
                sources.append(Rows(self.rows["entry"], index[piece.real]))
        return sparse_attention(
            q, tuple(sources), sink=self.inputs.sink, scale=scale, value_dim=q.shape[-1]
        )

    def _entry_rows(self, number: int, piece: Piece) -> Tensor:
        """[requests, width, at most top_k] rows of the entries that are read, -1 for none."""
        ratio, index = self.inputs.ratio, self.inputs.index
        rows = self.pool.entry_rows(piece.block_slots(ratio), ratio)
        visible = visible_entries(piece.positions, ratio)
        if index is None or rows.shape[1] <= index.top_k:
            seen = torch.arange(rows.shape[1], device=rows.device) < visible.unsqueeze(-1)
            return torch.where(seen, rows.unsqueeze(1), -1)
        if index.reuses_selection and number in self.selections:
            return self.selections[number]
        assert self._index_query is not None
        q, weights = self._index_query
        own = piece.group.rows
        keys = self.rows["index_key"]
        chosen = select_entries(q[own], weights[own], keys, rows, visible, index.top_k)
        if index.keeps_selection:
            self.selections[number] = chosen
        return chosen
