"""The decoder stack of a dense model as one loop over torch calls.

    SGLang   stack(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
             -> hidden, or (hidden, captured residuals)
The same signature; what falls away is the glue between SGLang's modules: about 330 module calls of
a 30-layer model, residual streams and per-layer rotary tables. The flat form adds the residual in
the product before it, where SGLang adds it in the norm after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.graph_utils import padded_extend_real_tokens
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from sglang_ext.kernels.rope import RotaryTables, rotate
from sglang_ext.srt.fast_forward.matching import (
    FlatLayer,
    NotFlat,
    check_process,
    check_stack,
    layer_linears,
    read_layer,
    read_norm,
)


class FlatDecoder:
    """Stands in for the `forward` of one decoder stack."""

    def __init__(self, stack: Any, *, pack: bool) -> None:
        self.stack, self.pack = stack, pack
        self.original: Callable[..., Any] = stack.forward
        self.rope = check_stack(stack)
        self.linears = frozenset(x for layer in stack.layers for x in layer_linears(layer))
        # Filled when someone asks to see a module run (debug dumps, --forward-hooks).
        self._hooks = [
            hooks for m in stack.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._cache: Tensor | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Read the stack's weights again."""
        self.layers: list[FlatLayer] = []
        for layer in self.stack.layers:
            self.layers.append(read_layer(layer, pack=self.pack))
        self.final_norm = read_norm(self.stack.norm)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        x = self.stack.embed_tokens(input_ids) if input_embeds is None else input_embeds
        if self._is_special(x, positions, forward_batch, pp_proxy_tensors):
            return self.original(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        captured = AuxHiddenStateList()
        x = self._run(x, self._tables(x.dtype).rows(positions), forward_batch, captured)
        out = self.final_norm(x)
        return (out, captured) if captured else out

    def _is_special(self, x: Tensor, positions: Tensor, batch: Any, proxy: Any) -> bool:
        """Forwards that need more of SGLang's layers than their sums."""
        return (
            proxy is not None
            or x.shape[0] == 0
            or x.dim() != 2
            or positions.dim() != 1
            or x.dtype != self.final_norm.weight.dtype
            or batch.forward_mode.is_idle()
            or padded_extend_real_tokens(x, batch) is not None
            or any(self._hooks)
        )

    def _tables(self, dtype: torch.dtype) -> RotaryTables:
        # SGLang replaces the table when a context grows beyond it.
        if self._cache is not self.rope.cos_sin_cache:
            self._cache = self.rope.cos_sin_cache
            self._rotary = RotaryTables(self._cache.to(dtype))
        return self._rotary

    def _run(
        self, x: Tensor, tables: tuple[Tensor, Tensor], batch: Any, captured: AuxHiddenStateList
    ) -> Tensor:
        """x [rows, hidden], the embeddings -> the residual after the last layer."""
        backend, wanted = get_attn_backend(), self.stack.layers_to_capture
        for index, layer in enumerate(self.layers):
            if index in wanted:
                captured.capture(x, owned=True)
            q, k, v = _project(layer, x, *tables)
            attended = backend.forward(q, k, v, layer.attn, batch, True)
            x = layer.out.plus(attended, x)
            inner = layer.mlp_norm(x)
            x = layer.down.plus(layer.gated(inner), x)
        return x


def _project(
    layer: FlatLayer, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q [rows, heads * dim] and k [rows, heads, dim], and v [rows, heads, dim]."""
    qkv = layer.qkv(layer.input_norm(x))
    heads = qkv.view(x.shape[0], -1, layer.head_dim)
    turned, v = torch.split_with_sizes(heads, layer.qk_v_heads, 1)
    if layer.qk_norm is not None:
        turned = torch.rms_norm(turned, (layer.head_dim,), None, layer.qk_eps) * layer.qk_norm
    turned = rotate(turned, cos, sin)
    q, k = torch.split_with_sizes(turned, layer.q_k_heads, 1)
    return q.flatten(1), k, v


def flatten(model: Any, *, pack: bool) -> tuple[FlatDecoder | None, list[str]]:
    """Replace the forward of the model's decoder stack; (None, [reason]) where it is left alone."""
    stack = getattr(model, "model", None)
    if not isinstance(stack, nn.Module) or not hasattr(stack, "layers"):
        return None, []
    try:
        check_process()
        decoder = FlatDecoder(stack, pack=pack)
    except NotFlat as reason:
        return None, [str(reason)]
    stack.forward = decoder
    return decoder, []
