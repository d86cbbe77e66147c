"""The backend `portable` with SGLang's own pools, layers and batches, mode by mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_ext.kernels.attention import AttentionSpec
from sglang_ext.kernels.attention.reference import reference_attention
from sglang_ext.srt.attention import backend_choices, register
from sglang_ext.srt.attention.portable import (
    PortableAttnBackend,
    PortableMultiStepDraftBackend,
    layer_spec,
)

HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 6, 2, 16, 512, 128


@dataclass
class World:
    """A pool of NaN, some requests in it, and a backend."""

    runner: Any
    backend: PortableAttnBackend
    pool_rows: torch.Tensor
    page: int

    @property
    def table(self) -> torch.Tensor:
        return self.runner.req_to_token_pool.req_to_token

    def slots(self, request: int, start: int, stop: int) -> torch.Tensor:
        return self.table[self.pool_rows[request], start:stop].long()

    def fill(self, request: int, length: int) -> None:
        own = self.slots(request, 0, length)
        for buffer in (
            *self.runner.token_to_kv_pool.k_buffer,
            *self.runner.token_to_kv_pool.v_buffer,
        ):
            buffer[own] = torch.randn(length, KV_HEADS, DIM).to(buffer.dtype)


def make_world(requests: int, *, page: int = 1, dtype: torch.dtype = torch.float32) -> World:
    torch.manual_seed(0)
    pool = MHATokenToKVPool(
        SLOTS * requests,
        page,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(float("nan"))
    table = ReqToTokenPool(requests + 2, CONTEXT, "cpu", enable_memory_saver=False)
    pages = torch.randperm(SLOTS * requests // page - 1) + 1
    per_request = CONTEXT // page
    for request in range(requests):
        own = pages[request * per_request : (request + 1) * per_request]
        table.req_to_token[request + 1] = (own[:, None] * page + torch.arange(page)).reshape(-1)
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=table, token_to_kv_pool=pool, page_size=page
    )
    return World(runner, PortableAttnBackend(runner), torch.arange(1, requests + 1), page)


def make_layer(**changes: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, 0.25, KV_HEADS, layer_id=1, **changes)


def make_batch(
    world: World,
    mode: ForwardMode,
    seq_lens: Sequence[int],
    write: torch.Tensor,
    *,
    pool_rows: torch.Tensor | None = None,
    **fields: Any,
) -> ForwardBatch:
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(seq_lens),
        input_ids=torch.zeros(len(write), dtype=torch.int64),
        req_pool_indices=world.pool_rows if pool_rows is None else pool_rows,
        seq_lens=torch.tensor(seq_lens),
        seq_lens_cpu=torch.tensor(seq_lens),
        seq_lens_sum=sum(seq_lens),
        out_cache_loc=write,
        **fields,
    )


def extend_fields(prefixes: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
    return {
        "extend_seq_lens": torch.tensor(rows, dtype=torch.int32),
        "extend_seq_lens_cpu": list(rows),
        "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
        "extend_prefix_lens_cpu": list(prefixes),
        "extend_num_tokens": sum(rows),
    }


def step(
    world: World,
    layer: RadixAttention,
    batch: ForwardBatch,
    prefixes: Sequence[int],
    rows: Sequence[int],
    *,
    pad_rows: int = 0,
    tree: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One forward of one layer, compared with the reference; returns the output."""
    total = sum(rows) + pad_rows
    dtype = world.runner.token_to_kv_pool.dtype
    q = torch.randn(total, HEADS * DIM).to(dtype)
    k, v = torch.randn(2, total, KV_HEADS, DIM).to(dtype)
    world.backend.init_forward_metadata(batch)
    got = world.backend.forward(q, k, v, layer, batch, **kwargs)
    keys = [p + r for p, r in zip(prefixes, rows, strict=True)]
    slots = world.table[world.pool_rows[: len(rows)], : max(keys)].long()
    pool = world.runner.token_to_kv_pool
    want = reference_attention(
        q.view(total, HEADS, DIM),
        pool.k_buffer[layer.layer_id],
        pool.v_buffer[layer.layer_id],
        slots,
        keys,
        rows,
        layer_spec(layer),
        kwargs.get("sinks"),
        tree,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        got.view(total, HEADS, DIM).float(), want, rtol=tolerance, atol=tolerance
    )
    written = window_slots(world, prefixes, rows)
    torch.testing.assert_close(pool.k_buffer[layer.layer_id][written], k[: sum(rows)])
    torch.testing.assert_close(pool.v_buffer[layer.layer_id][written], v[: sum(rows)])
    return got


def window_slots(world: World, prefixes: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [world.slots(r, p, p + n) for r, (p, n) in enumerate(zip(prefixes, rows, strict=True))]
    )


LAYERS = {
    "full": {},
    "window": {"sliding_window_size": 5},
    "cap": {"logit_cap": 3.0},
    "block": {"attn_type": AttentionType.ENCODER_ONLY},
    "block_window": {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 5},
}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_decode_verify(name: str, page: int, dtype: torch.dtype) -> None:
    layer = make_layer(**LAYERS[name])
    world = make_world(3, page=page, dtype=dtype)

    rows = [7, 1, 40]
    batch = make_batch(
        world,
        ForwardMode.EXTEND,
        rows,
        window_slots(world, [0] * 3, rows),
        **extend_fields([0] * 3, rows),
    )
    step(world, layer, batch, [0] * 3, rows)

    prefixes, rows = rows, [9, 1, 3]
    seq_lens = [p + r for p, r in zip(prefixes, rows, strict=True)]
    batch = make_batch(
        world,
        ForwardMode.MIXED,
        seq_lens,
        window_slots(world, prefixes, rows),
        **extend_fields(prefixes, rows),
    )
    step(world, layer, batch, prefixes, rows)

    prefixes, rows = seq_lens, [1, 1, 1]
    seq_lens = [p + 1 for p in prefixes]
    batch = make_batch(world, ForwardMode.DECODE, seq_lens, window_slots(world, prefixes, rows))
    step(world, layer, batch, prefixes, rows)

    prefixes, rows = seq_lens, [4, 4, 4]
    batch = make_batch(
        world,
        ForwardMode.TARGET_VERIFY,
        prefixes,
        window_slots(world, prefixes, rows),
        spec_info=SimpleNamespace(draft_token_num=4, custom_mask=None),
    )
    step(world, layer, batch, prefixes, rows)


@pytest.mark.parametrize("carrier", ["list", "tensor", "layout", "layout_device"])
def test_ragged_verify(carrier: str) -> None:
    world = make_world(3)
    prefixes, rows = [20, 3, 9], [1, 8, 3]
    for request, prefix in enumerate(prefixes):
        world.fill(request, prefix)
    lens: Any = torch.tensor(rows) if carrier == "tensor" else rows
    layout = None
    if carrier.startswith("layout"):
        host = rows if carrier == "layout" else None
        layout = SimpleNamespace(verify_lens=torch.tensor(rows), verify_lens_cpu=host)
        lens = None
    spec_info = SimpleNamespace(
        draft_token_num=8, custom_mask=None, verify_lens=lens, ragged_verify_layout=layout
    )
    write = window_slots(world, prefixes, rows)
    batch = make_batch(world, ForwardMode.TARGET_VERIFY, prefixes, write, spec_info=spec_info)
    step(world, make_layer(), batch, prefixes, rows)


def test_verify_without_row_count_is_refused() -> None:
    world = make_world(1)
    batch = make_batch(
        world, ForwardMode.TARGET_VERIFY, [3], torch.zeros(1).long(), spec_info=SimpleNamespace()
    )
    with pytest.raises(ValueError, match="spec_info: expected ragged_verify_layout"):
        world.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("layout", ["width", "full"])
@pytest.mark.parametrize("pad", [0, 2])
def test_tree_verify(layout: str, pad: int) -> None:
    world = make_world(2)
    prefixes, width = [11, 4], 4
    for request, prefix in enumerate(prefixes):
        world.fill(request, prefix)
    tree = torch.tensor(
        [
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
        ]
    ).bool()
    flat = tree.reshape(-1)
    if layout == "full":
        parts = [
            torch.cat([torch.ones(width, p).bool(), t], 1).reshape(-1)
            for p, t in zip(prefixes, tree, strict=True)
        ]
        flat = torch.cat(parts)
    rows = [width] * 2
    write = torch.cat([window_slots(world, prefixes, rows), torch.zeros(pad * width).long()])
    batch = make_batch(
        world,
        ForwardMode.TARGET_VERIFY,
        [*prefixes, *[1] * pad],
        write,
        pool_rows=torch.cat([world.pool_rows, torch.zeros(pad).long()]),
        spec_info=SimpleNamespace(draft_token_num=width, custom_mask=flat, tree_topk=2),
    )
    out = step(world, make_layer(), batch, prefixes, rows, pad_rows=pad * width, tree=tree)
    assert out[2 * width :].abs().sum() == 0


def test_padding_requests_and_tail_rows_are_zero() -> None:
    world = make_world(2)
    prefixes = [6, 30]
    for request, prefix in enumerate(prefixes):
        world.fill(request, prefix)
    write = torch.cat([window_slots(world, prefixes, [1, 1]), torch.zeros(3).long()])
    batch = make_batch(
        world,
        ForwardMode.DECODE,
        [7, 31, 1, 1],
        write,
        pool_rows=torch.tensor([1, 2, 0, 0]),
    )
    out = step(world, make_layer(), batch, prefixes, [1, 1], pad_rows=3)
    assert out[2:].abs().sum() == 0


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_idle(mode: ForwardMode, rows: int) -> None:
    world = make_world(1)
    batch = make_batch(
        world,
        mode,
        [1] if rows else [],
        torch.zeros(rows).long(),
        pool_rows=torch.zeros(1 if rows else 0).long(),
        spec_info=SimpleNamespace(draft_token_num=4, custom_mask=None),
        **extend_fields([0], [rows]) if rows else extend_fields([], []),
    )
    world.backend.init_forward_metadata(batch)
    q, kv = torch.randn(rows, HEADS * DIM), torch.randn(rows, KV_HEADS, DIM)
    out = world.backend.forward(q, kv, kv, make_layer(), batch)
    assert out.shape == q.shape
    assert out.abs().sum() == 0


def test_sinks_and_no_write() -> None:
    world = make_world(2)
    prefixes, rows = [5, 12], [3, 3]
    for request, prefix in enumerate(prefixes):
        world.fill(request, prefix)
    write = window_slots(world, prefixes, rows)
    spec_info = SimpleNamespace(draft_token_num=3, custom_mask=None)
    batch = make_batch(world, ForwardMode.TARGET_VERIFY, prefixes, write, spec_info=spec_info)
    step(world, make_layer(), batch, prefixes, rows, sinks=torch.linspace(-1, 1, HEADS))

    pool = world.runner.token_to_kv_pool
    before = pool.k_buffer[1].clone()
    q, kv = torch.randn(6, HEADS * DIM), torch.randn(6, KV_HEADS, DIM)
    kept = world.backend.forward(q, kv, kv, make_layer(), batch, save_kv_cache=False)
    absent = world.backend.forward(q, None, None, make_layer(), batch)
    torch.testing.assert_close(kept, absent)
    torch.testing.assert_close(pool.k_buffer[1], before, equal_nan=True)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("topk", [1, 3])
def test_multi_step_draft(page: int, topk: int) -> None:
    world, steps, prefixes = make_world(2, page=page), 3, [21, 5]
    for request, prefix in enumerate(prefixes):
        world.fill(request, prefix)
    multi = PortableMultiStepDraftBackend(world.runner, topk, steps)
    batch = make_batch(world, ForwardMode.DECODE, prefixes, torch.zeros(0).long())
    multi.init_forward_metadata(batch)
    layer, pool = make_layer(), world.runner.token_to_kv_pool
    chains: list[list[torch.Tensor]] = []
    for request, prefix in enumerate(prefixes):
        for branch in range(topk):
            first = prefix + branch * steps
            if page > 1 and topk > 1:
                partial = prefix % page
                pages = -(-(partial + steps) // page)
                first = prefix + branch * pages * page
            chains.append([world.slots(request, first + s, first + s + 1) for s in range(steps)])
    for s, backend in enumerate(multi.attn_backends):
        batch.out_cache_loc = torch.cat([c[s] for c in chains])
        q, k, v = (torch.randn(len(chains), n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        got = backend.forward(q.view(len(chains), -1), k, v, layer, batch)
        for i, chain in enumerate(chains):
            prefix = prefixes[i // topk]
            own = torch.cat([world.slots(i // topk, 0, prefix), *chain[: s + 1]])
            want = reference_attention(
                q[i : i + 1],
                pool.k_buffer[1],
                pool.v_buffer[1],
                own[None],
                [len(own)],
                [1],
                layer_spec(layer),
            )
            torch.testing.assert_close(got[i].view(1, HEADS, DIM), want, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_is_refused() -> None:
    world = make_world(1)
    world.fill(0, 4)
    batch = make_batch(world, ForwardMode.DECODE, [4], world.slots(0, 3, 4))
    world.backend.init_forward_metadata(batch)
    q, kv = torch.randn(1, HEADS * DIM), torch.randn(1, KV_HEADS, DIM)
    with pytest.raises(NotImplementedError, match="rel_bias"):
        world.backend.forward(q, kv, kv, make_layer(), batch, rel_bias=q)
    with pytest.raises(NotImplementedError, match="cross attention"):
        world.backend.forward(q, kv, kv, make_layer(is_cross_attention=True), batch)
    world.runner.token_to_kv_pool.kv_cache_layout = "hnd"
    with pytest.raises(NotImplementedError, match="expects 'nhd'"):
        PortableAttnBackend(world.runner)


def test_registration() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    register()
    assert backend_choices() == ["portable"]
    world = make_world(1)
    llama = SimpleNamespace(architectures=["LlamaForCausalLM"])
    world.runner.model_config = SimpleNamespace(hf_config=llama)
    backend = ATTENTION_BACKENDS["portable"](world.runner)
    assert isinstance(backend, PortableAttnBackend)
    assert backend.get_cpu_graph_seq_len_fill_value() == 1
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert backend.support_triton() is False


def test_sliding_window_pool() -> None:
    """Window layers live in a smaller pool with slots of its own; evicted ones hold NaN."""
    world, window = make_world(2), 4
    full = world.runner.token_to_kv_pool
    pool = SWAKVPool(
        full.size,
        64,
        1,
        torch.float32,
        KV_HEADS,
        DIM,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
    )
    for sub in (pool.full_kv_pool, pool.swa_kv_pool):
        for buffer in (*sub.k_buffer, *sub.v_buffer):
            buffer.fill_(float("nan"))
    prefixes, rows = [30, 9], [3, 3]
    keys = [p + r for p, r in zip(prefixes, rows, strict=True)]
    mapping = torch.zeros(full.size + 2, dtype=torch.int64)
    free = iter(range(1, 65))
    for request, (prefix, length) in enumerate(zip(prefixes, keys, strict=True)):
        kept = world.slots(request, max(0, prefix - window), length)
        mapping[kept] = torch.tensor([next(free) for _ in kept])
        for buffer in (*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer):
            buffer[mapping[kept]] = torch.randn(len(kept), KV_HEADS, DIM)
        for buffer in (*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer):
            own = world.slots(request, 0, length)
            buffer[own] = torch.randn(len(own), KV_HEADS, DIM)
    pool.register_mapping(mapping)
    world.runner.token_to_kv_pool = pool
    backend = PortableAttnBackend(world.runner)
    write = window_slots(world, prefixes, rows)
    spec_info = SimpleNamespace(draft_token_num=3, custom_mask=None)
    batch = make_batch(world, ForwardMode.TARGET_VERIFY, prefixes, write, spec_info=spec_info)
    backend.init_forward_metadata(batch)
    for layer_id, size in ((0, -1), (1, window)):
        layer = make_layer(sliding_window_size=size)
        layer.layer_id = layer_id
        q, k, v = (torch.randn(6, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        got = backend.forward(q.view(6, -1), k, v, layer, batch)
        slots = world.table[world.pool_rows, : max(keys)].long()
        want = reference_attention(
            q,
            # The naive sum multiplies evicted slots by a weight of 0.
            pool.get_key_buffer(layer_id).nan_to_num(),
            pool.get_value_buffer(layer_id).nan_to_num(),
            slots if layer_id == 0 else mapping[slots],
            keys,
            rows,
            layer_spec(layer),
        )
        torch.testing.assert_close(got.view(6, HEADS, DIM), want, rtol=1e-5, atol=1e-5)


def test_eight_bit_pool() -> None:
    world = make_world(2)
    pool = MHATokenToKVPool(
        world.runner.token_to_kv_pool.size,
        1,
        dtype=torch.float8_e4m3fn,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    world.runner.token_to_kv_pool = pool
    backend = PortableAttnBackend(world.runner)
    layer = make_layer()
    layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    rows = [7, 5]
    write = window_slots(world, [0, 0], rows)
    batch = make_batch(world, ForwardMode.EXTEND, rows, write, **extend_fields([0, 0], rows))
    backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(12, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    given = k.clone()
    got = backend.forward(q.view(12, -1), k, v, layer, batch)
    torch.testing.assert_close(k, given)
    slots = world.table[world.pool_rows, :7].long()
    want = reference_attention(
        q, pool.get_key_buffer(1), pool.get_value_buffer(1), slots, rows, rows, layer_spec(layer)
    )
    torch.testing.assert_close(got.view(12, HEADS, DIM), want, rtol=1e-5, atol=1e-5)
    exact = torch.zeros(pool.size + 1, KV_HEADS, DIM)
    exact_v = exact.clone()
    exact[write], exact_v[write] = k, v
    want = reference_attention(
        q, exact, exact_v, slots, rows, rows, AttentionSpec(scale=layer.scaling)
    )
    torch.testing.assert_close(got.view(12, HEADS, DIM), want, rtol=0.3, atol=0.3)


def test_latent_pool_takes_the_rotary_parts_apart() -> None:
    world, latent, rotary = make_world(2), 32, 8
    pool = MLATokenToKVPool(
        world.runner.token_to_kv_pool.size,
        1,
        dtype=torch.float32,
        kv_lora_rank=latent,
        qk_rope_head_dim=rotary,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    world.runner.token_to_kv_pool = pool
    backend = PortableAttnBackend(world.runner)
    layer = RadixAttention(HEADS, latent + rotary, 0.2, 1, layer_id=1, v_head_dim=latent)
    rows = [7, 40]
    write = window_slots(world, [0, 0], rows)
    batch = make_batch(world, ForwardMode.EXTEND, rows, write, **extend_fields([0, 0], rows))
    backend.init_forward_metadata(batch)
    q, q_rope = torch.randn(47, HEADS, latent), torch.randn(47, HEADS, rotary)
    k, k_rope = torch.randn(47, 1, latent), torch.randn(47, 1, rotary)
    with get_parallel().override(dcp_enabled=False):
        got = backend.forward(q.view(47, -1), k, k, layer, batch, q_rope=q_rope, k_rope=k_rope)
    want = reference_attention(
        torch.cat([q, q_rope], -1),
        pool.get_key_buffer(1),
        pool.get_value_buffer(1),
        world.table[world.pool_rows, :40].long(),
        rows,
        rows,
        layer_spec(layer),
    )
    torch.testing.assert_close(got.view(47, HEADS, latent), want, rtol=1e-5, atol=1e-5)
