"""Norms, gates, splits and routers of the `sgl_kernel` stand-in against per-element arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ext.srt.sgl_kernel_torch import gates, norms, router

EPS = 1e-6
ROWS = [0, 1, 5]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(11)


def norm_of(row: list[float]) -> list[float]:
    size = math.sqrt(sum(x * x for x in row) / len(row) + EPS)
    return [x / size for x in row]


def close(actual: torch.Tensor, expected: list[list[float]], dtype: torch.dtype) -> None:
    wanted = torch.tensor(expected).view(actual.shape)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm_and_l2norm(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 7).to(dtype), torch.randn(7).to(dtype)
    plain = [norm_of(row) for row in x.float().tolist()]
    scaled = [[a * w for a, w in zip(row, weight.tolist(), strict=True)] for row in plain]
    close(norms.l2norm_cpu(x, EPS), plain, dtype)
    close(norms.rmsnorm_cpu(x, weight, EPS), scaled, dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_gated_norm(rows: int) -> None:
    x, weight, gate = torch.randn(rows, 7), torch.randn(7), torch.randn(rows, 7)
    expected = [
        [a * w * g / (1 + math.exp(-g)) for a, w, g in zip(norm_of(r), weight, gs, strict=True)]
        for r, gs in zip(x.tolist(), gate.tolist(), strict=True)
    ]
    close(norms.fused_rmsnorm_gated_cpu(x, weight, gate, EPS), expected, torch.float32)


def test_dual_residual_norm_returns_both() -> None:
    x, residual = torch.randn(3, 7), torch.randn(3, 7)
    w1, w2 = torch.randn(7), torch.randn(7)
    mid = [
        [r + a * w for r, a, w in zip(rs, norm_of(xs), w1.tolist(), strict=True)]
        for rs, xs in zip(residual.tolist(), x.tolist(), strict=True)
    ]
    out = [[a * w for a, w in zip(norm_of(m), w2.tolist(), strict=True)] for m in mid]
    actual = norms.fused_dual_residual_rmsnorm_cpu(x, residual, w1, w2, EPS)
    close(actual[0], out, torch.float32)
    close(actual[1], mid, torch.float32)


@pytest.mark.parametrize("rows", ROWS)
def test_per_head_gemma_norm_with_and_without_gate(rows: int) -> None:
    heads, kv_heads, dim = 3, 2, 5
    q_gate, k = torch.randn(rows, heads, 2, dim), torch.randn(rows, kv_heads * dim)
    qw, kw = torch.randn(dim), torch.randn(dim)

    def expected(x: torch.Tensor, weight: torch.Tensor) -> list[list[float]]:
        return [
            [a * (1 + w) for a, w in zip(norm_of(h), weight.tolist(), strict=True)]
            for h in x.reshape(-1, dim).tolist()
        ]

    # A slice of a wider projection, as the model hands it over.
    wide = torch.cat([k, torch.full((rows, 4), math.nan)], dim=1)[:, : kv_heads * dim]
    q, key, gate = norms.fused_qk_gemma_rmsnorm_with_gate_cpu(
        q_gate.reshape(rows, heads * 2 * dim), wide, qw, kw, EPS, dim, heads
    )
    close(q, expected(q_gate[:, :, 0], qw), torch.float32)
    close(key, expected(k, kw), torch.float32)
    assert torch.equal(gate, q_gate[:, :, 1].reshape(-1, dim))
    flat = q_gate[:, :, 0].reshape(rows, heads * dim)
    plain_q, plain_k = norms.fused_qk_gemma_rmsnorm_cpu(flat, wide, qw, kw, EPS, dim)
    assert plain_q.shape == flat.shape
    assert torch.equal(plain_q.reshape(-1, dim), q)
    assert torch.equal(plain_k.reshape(-1, dim), key)


@pytest.mark.parametrize("ranks", [1, 3])
def test_row_norm_from_added_statistics_equals_the_norm_of_the_whole_row(ranks: int) -> None:
    q, k = torch.randn(4, 6 * ranks), torch.randn(4, 2 * ranks)
    qw, kw = torch.randn(6 * ranks), torch.randn(2 * ranks)
    whole = norms.fused_qk_rmsnorm_cpu(q, k, qw, kw, EPS)
    shares = [x.chunk(ranks, dim=-1) for x in (q, k, qw, kw)]
    stats = sum(
        (norms.fused_qk_rmsnorm_sumsq_cpu(a, b) for a, b in zip(*shares[:2], strict=True)),
        torch.zeros(4, 2),
    )
    parts = [
        norms.fused_qk_rmsnorm_apply_from_stats_cpu(a, b, aw, bw, stats, ranks, EPS)
        for a, b, aw, bw in zip(*shares, strict=True)
    ]
    for i in range(2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], -1), whole[i])
        torch.testing.assert_close(
            whole[i],
            torch.nn.functional.rms_norm((q, k)[i], (whole[i].shape[1],), (qw, kw)[i], EPS),
        )


@pytest.mark.parametrize("rows", ROWS)
def test_sigmoid_gate_in_place_with_a_strided_gate(rows: int) -> None:
    x = torch.randn(rows, 6)
    gate = torch.randn(rows, 2, 2, 3)[:, :, 1]
    expected = [
        [a / (1 + math.exp(-g)) for a, g in zip(r, gs, strict=True)]
        for r, gs in zip(x.tolist(), gate.reshape(rows, 6).tolist(), strict=True)
    ]
    gates.fused_sigmoid_mul_cpu(x, gate)
    close(x, expected, torch.float32)


def test_activations_multiply_the_second_half() -> None:
    x = torch.randn(3, 2, 10)
    first, second = x[..., :5], x[..., 5:]
    erf = 0.5 * first * (1 + torch.erf(first / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (first + 0.044715 * first**3)
    tanh = 0.5 * first * (1 + torch.tanh(inner))
    torch.testing.assert_close(gates.gelu_and_mul_cpu(x), erf * second)
    torch.testing.assert_close(gates.gelu_tanh_and_mul_cpu(x), tanh * second)
    torch.testing.assert_close(gates.silu_and_mul_cpu(x), first * torch.sigmoid(first) * second)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads_qk", "per_group"), [(1, 1), (2, 3)])
def test_projection_split(rows: int, heads_qk: int, per_group: int) -> None:
    head_qk, head_v = 3, 2
    heads_v = heads_qk * per_group
    q = torch.randn(rows, heads_qk, head_qk)
    k = torch.randn(rows, heads_qk, head_qk)
    v, z = torch.randn(2, rows, heads_v, head_v).unbind(0)
    b, a = torch.randn(2, rows, heads_v).unbind(0)
    sizes = (heads_qk, heads_v, head_qk, head_v)

    def flat(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def of_group(x: torch.Tensor, group: int) -> torch.Tensor:
        return x[:, group * per_group : (group + 1) * per_group]

    grouped = [flat(q[:, g], k[:, g], of_group(v, g), of_group(z, g)) for g in range(heads_qk)]
    grouped_ba = [flat(of_group(b, g), of_group(a, g)) for g in range(heads_qk)]
    for out in (
        gates.fused_qkvzba_split_reshape_cat_contiguous_cpu(flat(q, k, v, z), flat(b, a), *sizes),
        gates.fused_qkvzba_split_reshape_cat_cpu(flat(*grouped), flat(*grouped_ba), *sizes),
    ):
        for actual, expected in zip(out, (flat(q, k, v), z, b, a), strict=True):
            assert torch.equal(actual, expected)
            assert actual.is_contiguous()


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_router_with_soft_cap(cap: float, bias: bool) -> None:
    hidden, weight = torch.randn(4, 6), torch.randn(5, 6) * 3
    shift = torch.randn(5) if bias else None
    weights, ids = router.fused_moe_router_cpu(cap, hidden, weight, 3, False, shift)
    for row in range(4):
        logits = [float(hidden[row] @ weight[e]) for e in range(5)]
        if cap:
            logits = [cap * math.tanh(x / cap) for x in logits]
        if shift is not None:
            logits = [x + float(s) for x, s in zip(logits, shift, strict=True)]
        total = sum(math.exp(x) for x in logits)
        best = sorted(range(5), key=lambda e: -logits[e])[:3]
        assert ids[row].tolist() == best
        wanted = torch.tensor([math.exp(logits[e]) / total for e in best])
        torch.testing.assert_close(weights[row], wanted, rtol=1e-4, atol=1e-5)
    assert ids.dtype == torch.int32


def test_router_refuses_to_renormalise() -> None:
    with pytest.raises(NotImplementedError, match="renormalize: expected False, found True"):
        router.fused_moe_router_cpu(0.0, torch.randn(1, 2), torch.randn(3, 2), 1, True)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_topk_bias_chooses_but_does_not_weigh(renormalize: bool, bias: bool) -> None:
    logits = torch.randn(4, 6)
    shift = torch.randn(6) if bias else None
    for function, scores in (
        (router.topk_sigmoid_cpu, logits.sigmoid()),
        (router.topk_softmax_cpu, logits.softmax(-1)),
    ):
        weights, ids = function(logits, logits, 2, renormalize, shift)
        for row in range(4):
            ranked = scores[row] if shift is None else scores[row] + shift
            best = sorted(range(6), key=lambda e: -float(ranked[e]))[:2]
            assert ids[row].tolist() == best
            chosen = scores[row][best]
            wanted = chosen / chosen.sum() if renormalize else chosen
            torch.testing.assert_close(weights[row], wanted)
