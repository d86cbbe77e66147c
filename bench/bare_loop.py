"""The yardstick: one decode step of a Llama checkpoint as a plain loop of F.linear and SDPA."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class BareLlama:
    """Weights as the checkpoint has them and a K/V cache for one request; no framework around.

    logits = step(token) appends one token; the cache starts with `context` random tokens.
    """

    def __init__(self, path: Path, dtype: torch.dtype, context: int, room: int) -> None:
        config = json.loads((path / "config.json").read_text())
        weights = {k: v.to(dtype) for k, v in load_file(path / "model.safetensors").items()}
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.eps = config["rms_norm_eps"]
        self.embed = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.norm = weights["model.norm.weight"]
        self.dim = config.get("head_dim") or self.embed.shape[1] // self.heads
        self.layers = [_layer(weights, i) for i in range(config["num_hidden_layers"])]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        inverse = theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.outer(torch.arange(context + room).float(), inverse)
        self.cos = torch.cat((angles, angles), -1).cos().to(dtype)
        self.sin = torch.cat((angles, angles), -1).sin().to(dtype)
        shape = (len(self.layers), 2, self.kv_heads, context + room, self.dim)
        self.cache = torch.randn(shape).to(dtype)
        self.length = context

    @torch.inference_mode()
    def step(self, token: Tensor) -> Tensor:
        """token [1] -> logits [1, vocab]."""
        x = F.embedding(token, self.embed)
        cos, sin = self.cos[self.length], self.sin[self.length]
        self.length += 1
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = x + self._attend(
                F.rms_norm(x, x.shape[1:], layer[0], self.eps), layer, cache, cos, sin
            )
            inner = F.rms_norm(x, x.shape[1:], layer[5], self.eps)
            x = x + F.linear(
                F.silu(F.linear(inner, layer[6])) * F.linear(inner, layer[7]), layer[8]
            )
        return F.linear(F.rms_norm(x, x.shape[1:], self.norm, self.eps), self.head)

    def _attend(
        self, x: Tensor, layer: tuple[Tensor, ...], cache: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        q, k, v = (F.linear(x, w).view(-1, self.dim) for w in layer[1:4])
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        cache[0, :, self.length - 1], cache[1, :, self.length - 1] = k, v
        keys, values = cache[:, None, :, : self.length]
        out = F.scaled_dot_product_attention(q[None, :, None], keys, values, enable_gqa=True)
        return F.linear(out.reshape(1, -1), layer[4])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _layer(weights: dict[str, Tensor], index: int) -> tuple[Tensor, ...]:
    names = (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    return tuple(weights[f"model.layers.{index}.{name}.weight"] for name in names)
