"""DeepSeek-V4's MTP module written down naively: one forward over a whole sequence, no cache.

Nothing of the package is used. Shapes: T tokens, n streams, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus


class NaiveModule:
    """mtp.0 of a checkpoint, or another stage of its draft.

    tensors: the whole checkpoint in float32, by published name. raw: its config.json.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], raw: Mapping[str, Any], stage: int = 0
    ) -> None:
        own = f"mtp.{stage}."
        self.w = {n.removeprefix(own): tensors[n] for n in tensors if n.startswith(own)}
        self.embed, self.head, self.raw = tensors["embed.weight"], tensors["head.weight"], raw

    def __call__(self, following: Sequence[int], streams: Tensor) -> tuple[Tensor, Tensor]:
        """following [T], the token behind each; streams [T, n, D] -> logits [T, V], streams."""
        w = self.w
        told = self.norm(self.embed[list(following)], "enorm") @ w["e_proj.weight"].T
        x = torch.empty_like(streams)
        for i in range(self.raw["hc_mult"]):
            x[:, i] = told + self.norm(streams[:, i], "hnorm") @ w["h_proj.weight"].T
        x = self.around(x, "hc_attn", lambda y: self.attention(self.norm(y, "attn_norm")))
        x = self.around(x, "hc_ffn", lambda y: self.experts(self.norm(y, "ffn_norm")))
        return self.logits(x), x

    def logits(self, x: Tensor) -> Tensor:
        """[T, n, D] -> [T, V]."""
        w = self.w
        flat, r = self.flat(x)
        weights = torch.sigmoid(r * (flat @ w["hc_head_fn"].T) * w["hc_head_scale"]
                                + w["hc_head_base"]) + self.raw["hc_eps"]  # fmt: skip
        hidden = sum(weights[:, i, None] * x[:, i] for i in range(self.raw["hc_mult"]))
        return self.norm(hidden, "norm") @ self.head.T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return _unit(x, self.raw["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(1)
        mean = flat.square().mean(-1, keepdim=True)
        return flat, (mean + self.raw["rms_norm_eps"]) ** -0.5

    def around(self, x: Tensor, part: str, inner: Any) -> Tensor:
        """What a sublayer reads of the streams, and how its output comes back into them."""
        n, eps = self.raw["hc_mult"], self.raw["hc_eps"]
        flat, r = self.flat(x)
        m = r * (flat @ self.w[f"{part}_fn"].T)
        base, scale = self.w[f"{part}_base"], self.w[f"{part}_scale"]
        pre = torch.sigmoid(scale[0] * m[:, :n] + base[:n]) + eps
        post = 2 * torch.sigmoid(scale[1] * m[:, n : 2 * n] + base[n : 2 * n])
        comb = (scale[2] * m[:, 2 * n :] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.raw["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        y = inner(sum(pre[:, i, None] * x[:, i] for i in range(n)))
        out = torch.empty_like(x)
        for j in range(n):
            mixed = sum(comb[:, i, j, None] * x[:, i] for i in range(n))
            out[:, j] = post[:, j, None] * y + mixed
        return out

    def turn(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        """x [..., dim]: pairs of neighbours among the last rope dims, turned by the position."""
        width = self.raw["qk_rope_head_dim"]
        start = x.shape[-1] - width
        angle = sign * position * self.raw["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        a, b, c, s = x[..., start::2], x[..., start + 1 :: 2], angle.cos(), angle.sin()
        out = x.clone()
        out[..., start::2], out[..., start + 1 :: 2] = a * c - b * s, a * s + b * c
        return out

    def keys(self, x: Tensor, first: int = 0) -> Tensor:
        """Latents of x [T, D], whose rows stand at `first` and behind."""
        kv = self.norm(x @ self.w["attn.wkv.weight"].T, "attn.kv_norm")
        return torch.stack([self.turn(row, first + t) for t, row in enumerate(kv)])

    def attention(self, x: Tensor) -> Tensor:
        keys, window = self.keys(x), self.raw["sliding_window"]
        return self.read(x, 0, [keys[max(0, t - window + 1) : t + 1] for t in range(len(x))])

    def read(self, x: Tensor, first: int, visible: Sequence[Tensor]) -> Tensor:
        """x [T, D] from position `first` on; visible: the latents that each row reads."""
        raw, w = self.raw, {k.removeprefix("attn."): v for k, v in self.w.items()}
        heads, dim, groups = raw["num_attention_heads"], raw["head_dim"], raw["o_groups"]
        low = self.norm(x @ w["wq_a.weight"].T, "attn.q_norm")
        q = _unit((low @ w["wq_b.weight"].T).view(-1, heads, dim), raw["rms_norm_eps"])
        outs = []
        for t, seen in enumerate(visible):
            scores = self.turn(q[t], first + t) @ seen.T * dim**-0.5
            with_sink = torch.cat((scores, w["attn_sink"][:, None]), dim=1).softmax(-1)
            outs.append(self.turn(with_sink[:, :-1] @ seen, first + t, -1))
        by_group = torch.stack(outs).reshape(len(x), groups, -1)
        blocks = w["wo_a.weight"].view(groups, -1, by_group.shape[-1])
        lowered = [by_group[:, g] @ blocks[g].T for g in range(groups)]
        return torch.cat(lowered, dim=1) @ w["wo_b.weight"].T

    def experts(self, x: Tensor) -> Tensor:
        scores = softplus(x @ self.w["ffn.gate.weight"].T).sqrt()
        out = self.expert(x, "shared_experts")
        for t, row in enumerate(scores):
            chosen = (row + self.w["ffn.gate.bias"]).topk(self.raw["num_experts_per_tok"]).indices
            share = row[chosen] / (row[chosen].sum() + 1e-20) * self.raw["routed_scaling_factor"]
            for e, weight in zip(chosen.tolist(), share, strict=True):
                out[t] += weight * self.expert(x[t], f"experts.{e}")
        return out

    def expert(self, x: Tensor, name: str) -> Tensor:
        limit = self.raw["swiglu_limit"]
        w1, w2, w3 = (self.w[f"ffn.{name}.w{i}.weight"] for i in (1, 2, 3))
        gate, up = (x @ w1.T).clamp(max=limit), (x @ w3.T).clamp(-limit, limit)
        return (gate * torch.sigmoid(gate) * up) @ w2.T


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps) ** -0.5


def chain(
    module: NaiveModule, following: Sequence[int], streams: Tensor, steps: int
) -> tuple[list[int], list[Tensor]]:
    """Guesses behind the last row, and the logits [V] of each; each guess feeds the next row."""
    tokens, guesses, logits = list(following), [], []
    for _ in range(steps):
        out, own = module(tokens, streams)
        logits.append(out[-1])
        guesses.append(int(out[-1].argmax()))
        tokens.append(guesses[-1])
        streams = torch.cat((streams, own[-1:]))
    return guesses, logits


def rounds(
    module: NaiveModule, streams: Tensor, prompt: Sequence[int], answer: Sequence[int], steps: int
) -> int:
    """Verifications that speculation with chains of `steps` guesses takes for `answer`.

    streams: [T, n, D], the target's over prompt and answer.
    """
    text, known, count = [*prompt, *answer], len(prompt), 0
    # The prefill gives the token at `known`; a round adds what was guessed right and one more.
    while known + 1 < len(text):
        guesses, _ = chain(module, text[1 : known + 1], streams[:known], steps)
        rest = text[known + 1 :]
        right = next((i for i, g in enumerate(guesses) if [g] != rest[i : i + 1]), steps)
        known += right + 1
        count += 1
    return count
