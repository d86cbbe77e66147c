"""A second implementation of the drafts, written from the papers' definitions, for tests only.

Batch 1, no KV cache, no SGLang: a block is computed from the target's features of every committed
token before the anchor. Slow and plain on purpose; nothing here is shared with the product.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [..., n, heads, d], positions [..., n]; first half paired with the second."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[..., None].float() * frequency
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass
class ReferenceDraft:
    """Tensors and config of a draft checkpoint.

    embed, head: the target's embedding and output matrices [vocab, hidden].
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embed: Tensor
    head: Tensor

    @classmethod
    def load(cls, path: Path, embed: Tensor, head: Tensor) -> ReferenceDraft:
        config = json.loads((path / "config.json").read_text())
        return cls(config, load_file(path / "model.safetensors"), embed, head)

    def get(self, key: str, default: Any = None) -> Any:
        nested = self.config.get("dflash_config") or {}
        return nested.get(key, self.config.get(key, default))

    @property
    def is_dspark(self) -> bool:
        return self.get("markov_rank", 0) > 0

    @property
    def own_position(self) -> bool:
        """Whether a mask row predicts the token of its own position."""
        explicit = self.get("sample_from_anchor")
        if explicit is not None:
            return not explicit
        return self.config["architectures"][0] in ("DFlashDraftModel", "DFlash2DraftModel")

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    @property
    def layer_ids(self) -> list[int]:
        return list(self.get("target_layer_ids"))

    def fuse(self, features: Tensor) -> Tensor:
        """Concatenated features [..., n, ids * hidden] -> context c [..., n, hidden]."""
        t = self.tensors
        return rms(features @ t["fc.weight"].T, t["hidden_norm.weight"], self.eps)

    def _visible(self, layer: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """[..., q, k] bool, from the layer's kind."""
        types = self.get("layer_types")
        sliding = types is not None and types[layer] == "sliding_attention"
        causal = self.get("is_causal")
        causal = sliding if causal is None else causal
        distance = q_pos[..., :, None] - k_pos[..., None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            seen &= distance >= 0
        if sliding:
            seen &= distance < self.get("sliding_window")
        return seen

    def _attention(
        self, n: int, x: Tensor, c: Tensor, q_pos: Tensor, c_pos: Tensor, c_valid: Tensor
    ) -> Tensor:
        t, p = self.tensors, f"layers.{n}.self_attn."
        d, theta = self.config["head_dim"], float(self.config["rope_theta"])

        def heads(y: Tensor, name: str) -> Tensor:
            return (y @ t[f"{p}{name}.weight"].T).unflatten(-1, (-1, d))

        q = rope(rms(heads(x, "q_proj"), t[f"{p}q_norm.weight"], self.eps), q_pos, theta)
        keys = torch.cat((c, x), dim=-2)
        k_pos = torch.cat((c_pos, q_pos), dim=-1)
        k = rope(rms(heads(keys, "k_proj"), t[f"{p}k_norm.weight"], self.eps), k_pos, theta)
        v = heads(keys, "v_proj")
        groups = q.shape[-2] // k.shape[-2]
        k, v = k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) / d**0.5
        valid = torch.cat((c_valid, torch.ones_like(q_pos, dtype=torch.bool)), dim=-1)
        seen = self._visible(n, q_pos, k_pos) & valid[..., None, :]
        scores = scores.masked_fill(~seen[..., None, :, :], -torch.inf)
        out = torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v).flatten(-2)
        return out @ t[f"{p}o_proj.weight"].T

    def _mlp(self, n: int, x: Tensor) -> Tensor:
        t, p = self.tensors, f"layers.{n}.mlp."
        gate, up = x @ t[f"{p}gate_proj.weight"].T, x @ t[f"{p}up_proj.weight"].T
        return (F.silu(gate) * up) @ t[f"{p}down_proj.weight"].T

    def _convolved(self, n: int, name: str, x: Tensor, inner: Any) -> Tensor:
        """`inner` between the two block convolutions of DFlash 2, where the draft has them."""
        if f"layers.{n}.{name}.base_kernel" not in self.tensors:
            return inner(x)
        base = self.tensors[f"layers.{n}.{name}.base_kernel"]
        projection = self.tensors[f"layers.{n}.{name}.kernel_projection.weight"]
        taps, hidden = base.shape[1], base.shape[2]
        delta = (x @ projection.T).unflatten(-1, (2, taps, -1))
        group = hidden // delta.shape[-1]
        coefficient = base + delta.repeat_interleave(group, dim=-1)

        def convolve(y: Tensor, which: int) -> Tensor:
            out = torch.zeros_like(y)
            for tap in range(taps):
                shifted = F.pad(y, (0, 0, tap, 0))[..., : y.shape[-2], :]
                out = out + coefficient[..., which, tap, :] * shifted
            return out

        return convolve(inner(convolve(x, 0)), 1)

    def block(
        self, c: Tensor, c_pos: Tensor, c_valid: Tensor, anchor: Tensor, start: Tensor, rows: int
    ) -> Tensor:
        """Hidden states of the block rows after the final norm.

        c [..., n, hidden], c_pos, c_valid [..., n], anchor, start [...] -> [..., rows, hidden]
        """
        t = self.tensors
        mask = torch.full((*anchor.shape, rows - 1), self.get("mask_token_id"))
        x = F.embedding(torch.cat((anchor[..., None], mask), dim=-1), self.embed)
        positions = start[..., None] + torch.arange(rows)
        for n in range(self.config["num_hidden_layers"]):
            normed = rms(x, t[f"layers.{n}.input_layernorm.weight"], self.eps)
            x = x + self._convolved(
                n,
                "attention_conv",
                normed,
                lambda y, n=n: self._attention(n, y, c, positions, c_pos, c_valid),
            )
            normed = rms(x, t[f"layers.{n}.post_attention_layernorm.weight"], self.eps)
            x = x + self._convolved(n, "mlp_conv", normed, lambda y, n=n: self._mlp(n, y))
        return rms(x, t["norm.weight"], self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocabulary]."""
        head = self.head
        if "d2t" in self.tensors:
            head = head[self.target_ids]
        return hidden @ head.T

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft column."""
        if "d2t" not in self.tensors:
            return torch.arange(self.head.shape[0])
        d2t = self.tensors["d2t"]
        return torch.arange(len(d2t)) + d2t

    def draft(self, features: Tensor, anchor: int, gamma: int) -> list[int]:
        """Greedy drafts after `anchor`, which stands right behind `features` [n, ids * hidden]."""
        n = features.shape[0]
        rows = gamma + 1 if self.own_position else gamma
        hidden = self.block(
            self.fuse(features),
            torch.arange(n),
            torch.ones(n, dtype=torch.bool),
            torch.tensor(anchor),
            torch.tensor(n),
            rows,
        )
        hidden = hidden[1:] if self.own_position else hidden
        logits = self.logits(hidden)
        if self.is_dspark:
            return self._markov(hidden, logits, anchor)
        if "candidate_selector.predecessor_codebook" in self.tensors:
            return self._select(hidden, logits, anchor)
        return self.target_ids[logits.argmax(-1)].tolist()

    def _markov(self, hidden: Tensor, logits: Tensor, anchor: int) -> list[int]:
        t = self.tensors
        w1, w2 = t["markov_head.markov_w1.weight"], t["markov_head.markov_w2.weight"]
        kind = self.get("markov_head_type")
        state = torch.zeros(w1.shape[1])
        previous, out = anchor, []
        for h, base in zip(hidden, logits, strict=True):
            e = w1[previous]
            if kind == "gated":
                joint = torch.cat((h, e))
                weight, bias = t["markov_head.gate_proj.weight"], t["markov_head.gate_proj.bias"]
                e = torch.sigmoid(weight @ joint + bias) * e
            if kind == "rnn":
                joint = torch.cat((state, e, h))
                weight, bias = t["markov_head.joint_proj.weight"], t["markov_head.joint_proj.bias"]
                gate, candidate, shown = (weight @ joint + bias).chunk(3)
                keep = torch.sigmoid(gate)
                state = keep * state + (1 - keep) * torch.tanh(candidate)
                e = torch.tanh(shown)
            previous = int(self.target_ids[(base + w2 @ e).argmax()])
            out.append(previous)
        return out

    def _select(self, hidden: Tensor, logits: Tensor, anchor: int) -> list[int]:
        t, prefix = self.tensors, "candidate_selector."
        predecessor = t[f"{prefix}predecessor_codebook"]
        successor = t[f"{prefix}successor_codebook"]
        projection = t[f"{prefix}hidden_projection.weight"]
        previous, out = anchor, []
        for h, u in zip(hidden, logits, strict=True):
            candidates = u.topk(self.get("selector_top_k")).indices
            gate = predecessor[previous] * (projection @ h)
            scores = u[candidates] + successor[candidates] @ gate
            previous = int(candidates[scores.argmax()])
            out.append(previous)
        return out
