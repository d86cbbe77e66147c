"""What a mixture-of-experts layer is given: its experts and each row's choice of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertWeights:
    """The linears of the experts on this rank.

    Attributes:
        w13: [experts, width, hidden]; width is twice the intermediate size for gated experts.
        w2: [experts, hidden, intermediate].
        w13_bias: None or [experts, width].
        w2_bias: None or [experts, hidden].
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """The router's choice.

    Attributes:
        weights: [rows, top_k] float.
        ids: [rows, top_k] int, number of the expert on this rank; a negative id stands for an
            expert elsewhere, or none, and adds nothing.
        weigh_input: multiply the row by its weight before the experts instead of their output
            after (Llama 4); takes top_k = 1.
    """

    weights: torch.Tensor
    ids: torch.Tensor
    weigh_input: bool = False
