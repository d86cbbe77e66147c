"""What stands between an expert's two linears.

A gated expert splits its first linear's output into a gate and an up half. With L the limit:
    silu            silu(gate) * up
    silu, clamped   silu(min(gate, L)) * clip(up, -L, L)         DeepSeek-V4 (`swiglu_limit`)
    silu, capped    min(silu(gate), L) * clip(up, -L, L)         `gemm1_clamp_limit` alone
    silu, alpha     g * sigmoid(alpha * g) * (clip(up, -L, L) + 1), g = min(gate, L)     gpt-oss
    gelu            gelu_tanh(gate) * up
    situ            beta * tanh(gate / beta) * sigmoid(gate) * soft(up)                  Kimi K3
where soft(up) = L * tanh(up / L), or up itself without a limit. Without a gate: silu, gelu (erf)
or relu2, the squared rectifier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sglang_ext.core.router import clamped_swiglu

GATED_KINDS = ("silu", "gelu", "gelu_tanh", "situ")
UNGATED_KINDS = ("silu", "gelu", "relu2")
DEFAULT_SITU_BETA = 4.0


@dataclass(frozen=True)
class Activation:
    """One of the forms above.

    Attributes:
        kind: its name; "gelu_tanh" is "gelu" of a gated expert.
        gated: whether the first linear carries a gate half.
        alpha: alpha of the gpt-oss form, beta of situ.
        limit: L of the capped, alpha and situ forms.
        clamp: L of the clamped form, applied before silu.
        interleaved: gate and up alternate column by column (alpha form only).
    """

    kind: str = "silu"
    gated: bool = True
    alpha: float | None = None
    limit: float | None = None
    clamp: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        known = GATED_KINDS if self.gated else UNGATED_KINDS
        if self.kind not in known:
            raise ValueError(
                f"activation: expected one of {', '.join(known)} "
                f"({'with' if self.gated else 'without'} a gate), found {self.kind!r}"
            )
        if self.kind == "silu" and self.gated and self.alpha is not None and self.limit is None:
            raise ValueError("activation: limit: expected a number beside alpha, found None")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] -> [rows, width / 2] if gated, else [rows, width]; dtype kept."""
        if not self.gated:
            return _UNGATED[self.kind](x)
        if self.interleaved:
            return self._combine(x[..., ::2], x[..., 1::2])
        return self._combine(*x.chunk(2, dim=-1))

    def _combine(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.kind == "situ":
            return self._situ(gate, up)
        if self.kind != "silu":
            return F.gelu(gate, approximate="tanh") * up
        if self.alpha is not None:
            gate = gate.clamp(max=self.limit)
            return gate * torch.sigmoid(self.alpha * gate) * (self._clipped(up, self.limit) + 1)
        if self.limit is not None:
            return F.silu(gate).clamp(max=self.limit) * self._clipped(up, self.limit)
        if self.clamp is not None:
            return clamped_swiglu(gate, up, self.clamp)
        return F.silu(gate) * up

    @staticmethod
    def _clipped(x: torch.Tensor, limit: float | None) -> torch.Tensor:
        assert limit is not None
        return x.clamp(-limit, limit)

    def _situ(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        beta = DEFAULT_SITU_BETA if self.alpha is None else self.alpha
        wide_gate, wide_up = gate.float(), up.float()
        if self.limit is not None:
            wide_up = self.limit * torch.tanh(wide_up / self.limit)
        bounded = beta * torch.tanh(wide_gate / beta) * torch.sigmoid(wide_gate)
        return (bounded * wide_up).to(gate.dtype)


_UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}
