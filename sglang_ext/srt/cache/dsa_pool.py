"""DeepSeek-V3.2's state per token slot: the latent, and beside it the index key.

    k_buffer[layer]  [rows, 1, latent + rope]   what attention reads, as key and as value
    v_buffer[layer]  [rows, 1, index dim]       what the indexer scores
Both are functions of the token alone, so whatever SGLang does with slots (prefix sharing,
retraction, rewriting rejected drafts) is right for them, as for plain keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config


def bytes_per_token(config: DeepseekV32Config, layers: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes in `layers` layers of the pool."""
    return layers * (config.latent_dim + config.index_head_dim) * dtype.itemsize


class DsaTokenPool(MHATokenToKVPool):
    """SGLang's pool with rows of two widths; `pool_class` sets them."""

    latent_dim = 0
    index_dim = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        widths = {"head_num": 1, "head_dim": self.latent_dim, "v_head_dim": self.index_dim}
        super().__init__(*args, **{**kwargs, **widths})
        if self.kv_cache_layout != "nhd":
            raise NotImplementedError(
                f"kv_cache_layout: DeepSeek-V3.2 expects 'nhd', one row per token slot, found "
                f"{self.kv_cache_layout!r}; unset SGLANG_USE_HND_KVCACHE"
            )

    def latents(self, layer_id: int) -> torch.Tensor:
        """[rows, latent + rope] of one layer."""
        return self.get_key_buffer(layer_id).squeeze(1)

    def index_keys(self, layer_id: int) -> torch.Tensor:
        """[rows, index dim] of one layer."""
        return self.get_value_buffer(layer_id).squeeze(1)

    def write(
        self, layer_id: int, slots: torch.Tensor, latent: torch.Tensor, index_key: torch.Tensor
    ) -> None:
        """Store [tokens, latent + rope] and [tokens, index dim] at `slots` [tokens]."""
        self.latents(layer_id).index_copy_(0, slots, latent.to(self.store_dtype))
        self.index_keys(layer_id).index_copy_(0, slots, index_key.to(self.store_dtype))


def pool_class(config: DeepseekV32Config) -> type[DsaTokenPool]:
    """The pool of one checkpoint, for SGLang to construct."""
    widths = {"latent_dim": config.latent_dim, "index_dim": config.index_head_dim}
    return type("DsaTokenPool", (DsaTokenPool,), widths)
