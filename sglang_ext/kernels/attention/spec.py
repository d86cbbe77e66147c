"""What one attention layer asks for, independent of the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Static properties of a layer.

    scale: factor on q.k before the softmax.
    causal: a row sees no key after its own position; False for draft blocks and encoders.
    window: keys before its own position that a row sees (a window of w tokens that counts the
        row itself is w - 1); -1 for all. A non-causal row is bounded on the left side only.
    logit_cap: scores become cap * tanh(score / cap); 0 for none.
    k_scale, v_scale: what the stored keys and values were divided by.
    """

    scale: float
    causal: bool = True
    window: int = -1
    logit_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
