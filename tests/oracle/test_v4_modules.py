"""Hyper-connections, routers, MoE activation and output projection against HF's own modules.

Deliberate faults at the end: each must differ from HF, so that agreement means something.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.core import hyper_connection as core_hc
from sglang_ext.core.router import clamped_swiglu
from sglang_ext.kernels.grouped_output import grouped_output
from sglang_ext.kernels.hyper_connection import HcMix, hc_head, hc_post, hc_pre
from sglang_ext.kernels.router import route_grouped_sigmoid, route_hash, route_sqrtsoftplus

pytestmark = pytest.mark.oracle

EPS = {"eps": 1e-6, "rms_eps": 1e-6}
TOKENS, WIDTH, STREAMS = 37, 48, 4


def _config(**changes: Any) -> Any:
    from transformers import DeepseekV4Config

    sizes = {
        "vocab_size": 97, "hidden_size": WIDTH, "moe_intermediate_size": 24, "hc_mult": STREAMS,
        "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 32, "o_groups": 3,
        "o_lora_rank": 10, "n_routed_experts": 24, "num_experts_per_tok": 5,
        "routed_scaling_factor": 1.5, "swiglu_limit": 1.0,
    }  # fmt: skip
    return DeepseekV4Config(**{**sizes, **changes})


def _filled(module: torch.nn.Module, scale: float = 1.0) -> Any:
    """Every parameter and buffer random, nothing left at an initial value that hides a fault."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return module


def _streams(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, STREAMS, WIDTH, generator=generator).to(dtype)


def _hyper_connection() -> Any:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    return _filled(DeepseekV4HyperConnection(_config()), 0.5)


@torch.no_grad()
def _hf_round(streams: Tensor, y: Tensor) -> tuple[HcMix, Tensor]:
    """HF's mix, and its decoder layer's combination with the sublayer output y."""
    post, comb, collapsed = _hyper_connection()(streams.unsqueeze(0))
    dtype = streams.dtype
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    mixed = post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + mixed
    return HcMix(collapsed[0], post[0], comb[0]), mixed[0]


@torch.no_grad()
def _our_round(streams: Tensor, y: Tensor) -> tuple[HcMix, Tensor]:
    module = _hyper_connection()
    weights = (module.fn.data, module.base.data, module.scale.data)
    mix = hc_pre(streams, *weights, iters=20, **EPS)
    return mix, hc_post(y, streams, mix.post, mix.comb)


def test_hyper_connection_equals_hf() -> None:
    streams = _streams()
    y = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected, expected_mixed = _hf_round(streams, y)
    found, mixed = _our_round(streams, y)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(mixed, expected_mixed, rtol=2e-5, atol=1e-5)


def test_hyper_connection_in_bfloat16_is_within_one_rounding() -> None:
    streams = _streams(torch.bfloat16)
    found, expected = (f(streams, streams[:, 0]) for f in (_our_round, _hf_round))
    torch.testing.assert_close(found[0].x, expected[0].x, rtol=1 / 128, atol=1e-3)
    torch.testing.assert_close(found[0].comb, expected[0].comb, rtol=2e-5, atol=2e-6)


@torch.no_grad()
def test_head_equals_hf() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

    module = _filled(DeepseekV4HyperHead(_config()), 0.5)
    weights = (module.hc_fn.data, module.hc_base.data, module.hc_scale.data)
    found = hc_head(_streams(), *weights, **EPS)
    torch.testing.assert_close(found, module(_streams().unsqueeze(0))[0], rtol=2e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("experts", [24, 96])
def test_top_k_router_equals_hf(experts: int) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    module = _filled(DeepseekV4TopKRouter(_config(n_routed_experts=experts)), 0.5)
    hidden = _streams()[:, 0]
    logits, weights, ids = module(hidden)
    found = route_sqrtsoftplus(logits, module.e_score_correction_bias, top_k=5, scaling=1.5)
    _same_choice(found, (ids, weights))


@torch.no_grad()
def test_hash_router_equals_hf() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    module = _filled(DeepseekV4HashRouter(_config()), 0.5)
    generator = torch.Generator().manual_seed(0)
    module.tid2eid.copy_(torch.rand(97, 24, generator=generator).argsort(-1)[:, :5])
    token_ids = torch.randint(0, 97, (TOKENS,), generator=generator)
    logits, weights, ids = module(_streams()[:, 0], token_ids)
    found = route_hash(logits, token_ids, module.tid2eid, scaling=1.5)
    assert torch.equal(found.ids, ids)
    torch.testing.assert_close(found.weights, weights)


@torch.no_grad()
def test_grouped_router_equals_hf() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=WIDTH, n_routed_experts=24, n_group=6, topk_group=2, num_experts_per_tok=5,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    module = _filled(DeepseekV3TopkRouter(config), 0.5)
    logits, weights, ids = module(_streams()[:, 0])
    found = route_grouped_sigmoid(
        logits, module.e_score_correction_bias, n_group=6, topk_group=2, top_k=5, scaling=2.5
    )
    _same_choice(found, (ids, weights))


def _same_choice(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """HF lists the chosen experts in no order."""
    ours, theirs = found[0].sort(-1), expected[0].sort(-1)
    assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(
        found[1].gather(1, ours.indices), expected[1].gather(1, theirs.indices)
    )


@torch.no_grad()
def test_activation_equals_hf() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP

    module = _filled(DeepseekV4MLP(_config()), 0.5)
    hidden = _streams()[:, 0]
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    assert (gate.abs() > 1).any()
    assert (up.abs() > 1).any()
    found = module.down_proj(clamped_swiglu(gate, up, 1.0))
    torch.testing.assert_close(found, module(hidden), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_grouped_output_equals_hf() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
        DeepseekV4GroupedLinear,
        apply_rotary_pos_emb,
    )

    generator = torch.Generator().manual_seed(0)
    o = torch.randn(TOKENS, 6, 32, generator=generator)
    angle = torch.outer(torch.arange(TOKENS).float(), torch.rand(4, generator=generator))
    module = _filled(DeepseekV4GroupedLinear(64, 30, 3), 0.2)
    unrotated = apply_rotary_pos_emb(o.unsqueeze(0), angle.cos()[None], -angle.sin()[None], 2)
    expected = module(unrotated.reshape(1, TOKENS, 3, -1)).flatten(2)[0]
    found = grouped_output(o, angle.cos(), angle.sin(), module.weight.data.view(3, 10, 64))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _swap_streams_of_comb(mix: HcMix) -> HcMix:
    return mix._replace(comb=mix.comb.transpose(1, 2))


def _swap_pre_and_post(mix: HcMix) -> HcMix:
    return mix._replace(post=mix.post / 2)


def _reverse_post(mix: HcMix) -> HcMix:
    return mix._replace(post=mix.post.flip(1))


@torch.no_grad()
@pytest.mark.parametrize("fault", [_swap_streams_of_comb, _swap_pre_and_post, _reverse_post])
def test_a_wrong_mix_is_told_from_hf(fault: Any) -> None:
    streams = _streams()
    _, expected = _hf_round(streams, streams[:, 0])
    mix = fault(_our_round(streams, streams[:, 0])[0])
    found = core_hc.hc_post(streams[:, 0], streams, mix.post, mix.comb)
    assert (found - expected).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(
    "fault",
    ["stream order of fn", "comb column by column", "two iterations", "no eps in pre"],
)
def test_a_wrong_projection_is_told_from_hf(fault: str) -> None:
    streams, module = _streams(), _hyper_connection()
    expected, _ = _hf_round(streams, streams[:, 0])
    fn, base, scale, iters, eps = module.fn, module.base, module.scale, 20, 1e-6
    rows = torch.arange(24)
    if fault == "stream order of fn":
        # The flat token as [D, n] instead of [n, D].
        fn = fn.unflatten(1, (STREAMS, WIDTH)).transpose(1, 2).flatten(1)
    elif fault == "comb column by column":
        rows[8:] = rows[8:].view(4, 4).T.flatten()
    elif fault == "two iterations":
        iters = 2
    else:
        eps = 0.0
    found = core_hc.hc_pre(streams, fn[rows], base[rows], scale, iters=iters, eps=eps, rms_eps=1e-6)
    worst = max((a - b).abs().max() for a, b in zip(found, expected, strict=True))
    assert worst > (1e-6 if fault == "no eps in pre" else 1e-3)
