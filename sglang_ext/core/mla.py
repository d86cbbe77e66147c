"""Multi-head latent attention: the cache keeps one latent per token for all heads.

    k_h = [W_uk_h c ; r]        v_h = W_uv_h c        c [latent], r [rope] shared by the heads
A score q_h . k_h equals [W_uk_h^T q_nope ; q_rope] . [c ; r], so a query can be "absorbed" once and
scored against the cache as it is; the attention output over c then becomes the head's value by
W_uv_h. Or the latents are expanded to keys and values first, which costs more per token and less
per query: `expanding_pays` compares.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UpProjection:
    """W_uk and W_uv of the heads on this rank.

    weight: [heads * (nope + value), latent], each head's key rows before its value rows.
    """

    weight: Tensor
    nope: int
    value: int

    def _heads(self) -> Tensor:
        return self.weight.view(-1, self.nope + self.value, self.weight.shape[-1])

    def absorb(self, q: Tensor) -> Tensor:
        """[rows, heads, nope + rope] -> [rows, heads, latent + rope]."""
        w_uk = self._heads()[:, : self.nope].to(q.dtype)
        latent = torch.bmm(q[..., : self.nope].transpose(0, 1), w_uk).transpose(0, 1)
        return torch.cat((latent, q[..., self.nope :]), dim=-1)

    def values(self, out: Tensor) -> Tensor:
        """Attention output over latents, [rows, heads, latent] -> [rows, heads, value]."""
        w_uv = self._heads()[:, self.nope :].to(out.dtype)
        return torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)

    def expand(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, latent + rope] -> keys [tokens, heads, nope + rope], values [.., value]."""
        latent = self.weight.shape[-1]
        up = cached[:, :latent] @ self.weight.to(cached.dtype).t()
        up = up.view(cached.shape[0], -1, self.nope + self.value)
        rope = cached[:, None, latent:].expand(-1, up.shape[1], -1)
        return torch.cat((up[..., : self.nope], rope), dim=-1), up[..., self.nope :]

    def expanding_pays(self, rows: int, tokens: int, rope: int) -> bool:
        """Whether expanding `tokens` latents for `rows` queries takes fewer multiplications."""
        latent, width = self.weight.shape[-1], self.nope + self.value
        expanded = tokens * (latent * width + rows * (width + rope))
        absorbed = rows * (latent * width + tokens * (2 * latent + rope))
        return expanded < absorbed
