"""DeepSeek-V4's state per token slot.

    latent      every layer     [rows, dim]              the token's rotated latent: key and value
    entry       CSA, HCA        [rows / stride, dim]     the entry of the block that ends here
    raw         CSA, HCA        [rows, 2 * series * dim] what the token gives to entries, float32
    index_raw   CSA             [rows, 4 * index dim]    the same for the indexer, float32
    index_key   CSA             [rows / stride, index dim]  the indexer's key of that block, float32

A row is a function of the tokens up to its own, and an entry is made anew whenever its last token
is written. So whatever SGLang does with slots (prefix sharing, retraction, rewriting rejected
drafts, cutting prompts) is right for all of it, without state per request.

Entries exist at the last token of a block only. Where pages are multiples of the ratio, a block
lies inside a page, and its entry takes the row slot // ratio: stride is the ratio. Otherwise the
entry takes the slot's own row: stride is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_ext.core.compress import CSA, raw_width
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config


@dataclass(frozen=True)
class Buffer:
    """One kind of row: `width` elements of `dtype` for every `stride` tokens."""

    name: str
    width: int
    dtype: torch.dtype
    stride: int = 1

    @property
    def bytes_per_token(self) -> float:
        return self.width * self.dtype.itemsize / self.stride


def stride_of(ratio: int, page_size: int) -> int:
    """Tokens per row of the entries."""
    return ratio if page_size % ratio == 0 else 1


def layer_buffers(
    config: DeepseekV4Config, ratio: int, dtype: torch.dtype, page_size: int
) -> tuple[Buffer, ...]:
    """What one layer keeps; pool and sizing both follow it."""
    latent = Buffer("latent", config.head_dim, dtype)
    if not ratio:
        return (latent,)
    stride, wide = stride_of(ratio, page_size), torch.float32
    kept: tuple[Buffer, ...] = (
        latent,
        Buffer("entry", config.head_dim, dtype, stride),
        Buffer("raw", raw_width(ratio, config.head_dim), wide),
    )
    if ratio != CSA:
        return kept
    return (
        *kept,
        Buffer("index_raw", raw_width(ratio, config.index_head_dim), wide),
        Buffer("index_key", config.index_head_dim, wide, stride),
    )


def bytes_per_token(config: DeepseekV4Config, dtype: torch.dtype, page_size: int) -> int:
    """Bytes that one token takes over all layers, rounded up."""
    total = sum(
        buffer.bytes_per_token
        for ratio in config.compress_ratios
        for buffer in layer_buffers(config, ratio, dtype, page_size)
    )
    return int(-(-total // 1))


class Dsv4TokenPool(MHATokenToKVPool):
    """SGLang's pool with other rows; `pool_class` says of which checkpoint.

    Attributes:
        rows: by layer, by name: the buffers above.
        ratios: by layer.
    """

    facts: DeepseekV4Config

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        dim = self.facts.head_dim
        # Nothing that runs with this model moves rows, so SGLang's copy kernel is not set up.
        fixed = {"head_num": 1, "head_dim": dim, "v_head_dim": dim, "enable_kv_cache_copy": False}
        super().__init__(*args, **{**kwargs, **fixed})

    def _create_buffers(self) -> None:
        if self.is_quantized_kv_cache or self.kv_cache_layout != "nhd" or self.post_capture_active:
            raise NotImplementedError(
                "token pool: DeepSeek-V4 expects unquantised rows in layout 'nhd', found "
                f"{self.kv_cache_layout!r}, quantised: {self.is_quantized_kv_cache}; leave "
                "--kv-cache-dtype and SGLANG_USE_HND_KVCACHE unset"
            )
        first = self.start_layer
        self.ratios = self.facts.compress_ratios[first : first + self.layer_num]
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.rows = [self._layer_rows(ratio) for ratio in self.ratios]
        # SGLang's size report and pointer tables read these two.
        self.k_buffer = [rows["latent"].unsqueeze(1) for rows in self.rows]
        self.v_buffer = [rows["latent"].new_empty(0, 1, 0) for rows in self.rows]
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()

    def _layer_rows(self, ratio: int) -> dict[str, Tensor]:
        tokens = self.size + self.page_size
        return {
            b.name: torch.zeros(-(-tokens // b.stride), b.width, dtype=b.dtype, device=self.device)
            for b in layer_buffers(self.facts, ratio, self.store_dtype, self.page_size)
        }

    def _clear_buffers(self) -> None:
        del self.k_buffer, self.v_buffer, self.rows

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        raise NotImplementedError(
            "move_kv_cache: DeepSeek-V4's entries belong to blocks and cannot move by token; "
            "expected DFLASH, DSPARK or no speculation"
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        sizes = [{name: t.nbytes for name, t in rows.items()} for rows in self.rows]
        latents = sum(size["latent"] for size in sizes)
        return latents, sum(sum(size.values()) for size in sizes) - latents

    def get_contiguous_buf_infos(self) -> Any:
        raise NotImplementedError("KV transfer: DeepSeek-V4's rows are not sent between servers")

    get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos

    def layer(self, layer_id: int) -> dict[str, Tensor]:
        """The buffers of one layer by name."""
        return self.rows[layer_id - self.start_layer]

    def entry_rows(self, slots: Tensor, ratio: int) -> Tensor:
        """Rows of the entries whose blocks end at `slots`; negative slots stay negative."""
        stride = stride_of(ratio, self.page_size)
        return slots if stride == 1 else torch.div(slots, stride, rounding_mode="floor")


def pool_class(config: DeepseekV4Config) -> type[Dsv4TokenPool]:
    """The pool of one checkpoint, for SGLang to construct."""
    return type("Dsv4TokenPool", (Dsv4TokenPool,), {"facts": config})
