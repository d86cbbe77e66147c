"""The frozen target: its weights, packed for bf16 matmuls, and a forward over token rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sglang_ext.training.rows import (
    CacheShape,
    NativeRowOps,
    RowOps,
    TorchRowOps,
    native_available,
)


class PackedLinear:
    """A bf16 linear map without bias, its weight laid out once for oneDNN where that exists."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.contiguous()
        self._packed: torch.Tensor | None = None
        if torch.backends.mkldnn.is_available() and weight.dtype == torch.bfloat16:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 256)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self.weight)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, None, "none", [], ""
        )
        return out


@dataclass(frozen=True)
class Layer:
    """One decoder layer; q, k, v and gate, up are stacked along the output axis."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Target:
    """A Llama checkpoint with tied or separate head, run over rows (see `rows`).

    Args:
        path: Hugging Face checkpoint directory (one safetensors file, bf16).
        slots: sequences that may be live at once. capacity: positions per slot.
    """

    def __init__(self, path: Path, *, slots: int, capacity: int, native: bool | None = None):
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        # Newer checkpoints keep it in a nested record.
        nested = self.config.get("rope_parameters") or {}
        self.rope_theta = float(self.config.get("rope_theta") or nested["rope_theta"])
        weights = load_file(path / "model.safetensors")
        config = self.config
        self.hidden = int(config["hidden_size"])
        self.num_layers = int(config["num_hidden_layers"])
        self.weights = weights
        self.embedding = weights["model.embed_tokens.weight"]
        self.head_weight = weights.get("lm_head.weight", self.embedding)
        self.head = PackedLinear(self.head_weight)
        self.final_norm = weights["model.norm.weight"]
        self.layers = [self._layer(i) for i in range(self.num_layers)]
        shape = CacheShape(
            layers=self.num_layers,
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            slots=slots,
            capacity=capacity,
            rope_theta=self.rope_theta,
            norm_eps=float(config["rms_norm_eps"]),
        )
        use_native = native_available() if native is None else native
        self.ops: RowOps = NativeRowOps(shape) if use_native else TorchRowOps(shape)
        self.shape = shape

    def _layer(self, index: int) -> Layer:
        def get(name: str) -> torch.Tensor:
            return self.weights[f"model.layers.{index}.{name}.weight"]

        qkv = torch.cat([get(f"self_attn.{name}_proj") for name in "qkv"])
        gate_up = torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")])
        return Layer(
            input_norm=get("input_layernorm"),
            qkv=PackedLinear(qkv),
            output=PackedLinear(get("self_attn.o_proj")),
            post_norm=get("post_attention_layernorm"),
            gate_up=PackedLinear(gate_up),
            down=PackedLinear(get("mlp.down_proj")),
        )

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor,
        slot: torch.Tensor,
        position: torch.Tensor,
        *,
        capture: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run rows through the model, writing their keys and values.

        Args:
            tokens, slot, position: [rows] int64. A slot's rows must come in position order, and
                earlier positions of the slot must have been run before or be in this call.
            capture: layers whose output (residual stream) is returned.

        Returns:
            The final hidden states after the last norm [rows, hidden], and the captured outputs,
            each [rows, hidden].
        """
        residual = self.embedding[tokens]
        captured: dict[int, torch.Tensor] = {}
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            x = self.ops.add_norm(residual, delta, layer.input_norm)
            if index - 1 in capture:
                captured[index - 1] = residual.clone()
            mixed = layer.output(self.ops.attend(index, layer.qkv(x), slot, position))
            x = self.ops.add_norm(residual, mixed, layer.post_norm)
            delta = layer.down(self.ops.silu_mul(layer.gate_up(x)))
        final = self.ops.add_norm(residual, delta, self.final_norm)
        if self.num_layers - 1 in capture:
            captured[self.num_layers - 1] = residual.clone()
        return final, [captured[index] for index in capture]
