"""Our MoE adapter against SGLang's own plain-torch MoE, where that one can run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.srt.moe import activation_of, moe_forward

ROWS, HIDDEN, INNER, EXPERTS, TOP_K = 6, 8, 5, 4, 2


def layer_of(bias: bool) -> SimpleNamespace:
    layer = SimpleNamespace(
        num_experts=EXPERTS,
        w13_weight=torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        w2_weight=torch.randn(EXPERTS, HIDDEN, INNER),
    )
    if bias:
        layer.w13_weight_bias = torch.randn(EXPERTS, 2 * INNER)
        layer.w2_weight_bias = torch.randn(EXPERTS, HIDDEN)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu"},
        {"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": 1.5},
        {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 0.8},
    ],
    ids=["silu", "gelu", "situ", "gpt-oss"],
)
def test_equals_sglang(options: dict[str, object], bias: bool) -> None:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    torch.manual_seed(4)
    config = MoeRunnerConfig(**options)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(ROWS)]).int()
    chosen = StandardTopKOutput(torch.rand(ROWS, TOP_K), ids, torch.empty(0))
    layer, x = layer_of(bias), torch.randn(ROWS, HIDDEN)
    with torch.compiler.set_stance("force_eager"):
        expected = fused_moe_native.moe_forward_native(layer, x, chosen, config)
    torch.testing.assert_close(moe_forward(layer, x, chosen, config), expected)


def test_clamp_of_the_config_reaches_the_activation() -> None:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    assert activation_of(MoeRunnerConfig(swiglu_limit=10.0)).clamp == 10.0
    assert not activation_of(MoeRunnerConfig(swiglu_limit=10.0)).interleaved


def test_rows_of_other_ranks_and_empty_batches() -> None:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    layer, config = layer_of(False), MoeRunnerConfig()
    elsewhere = StandardTopKOutput(
        torch.ones(2, TOP_K), torch.full((2, TOP_K), -1).int(), torch.empty(0)
    )
    out = moe_forward(layer, torch.randn(2, HIDDEN), elsewhere, config)
    assert torch.equal(out, torch.zeros(2, HIDDEN))
    nobody = StandardTopKOutput(torch.ones(0, TOP_K), torch.zeros(0, TOP_K).int(), torch.empty(0))
    assert moe_forward(layer, torch.randn(0, HIDDEN), nobody, config).shape == (0, HIDDEN)
