"""Causal convolution and gated delta rule of the stand-in against loops over single tokens."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ext.srt.sgl_kernel_torch import conv1d, delta_rule

SLOTS, DIM = 6, 5


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


def convolved(
    history: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, dim] and the last inputs, for history and x [tokens, dim]."""
    width = weight.shape[1]
    line = torch.cat([history, x])
    out = torch.empty_like(x)
    for token in range(x.shape[0]):
        for channel in range(x.shape[1]):
            total = float(bias[channel])
            for tap in range(width):
                total += float(line[token + tap, channel]) * float(weight[channel, tap])
            out[token, channel] = total / (1 + math.exp(-total)) if silu else total
    return out, line[line.shape[0] - (width - 1) :]


# Lengths below, at and above the kernel's reach; a padded sequence; a lone one.
@pytest.mark.parametrize("lengths", [[4], [1, 0, 7], [2, 3, 1, 5]])
@pytest.mark.parametrize(("width", "silu"), [(4, True), (2, False)])
def test_packed_convolution(lengths: list[int], width: int, silu: bool) -> None:
    batch, tokens = len(lengths), sum(lengths)
    x = torch.randn(DIM, tokens + 2)  # two columns of padding behind the last sequence
    weight, bias = torch.randn(DIM, width), torch.randn(DIM)
    states = torch.randn(SLOTS, DIM, width)  # one column more than is carried
    expected_states = states.clone()
    resumed = torch.tensor([i % 2 == 0 for i in range(batch)])
    slots = torch.tensor([5, -1, 2, 0][:batch], dtype=torch.int32)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = torch.zeros(DIM, tokens + 2)
    for i, slot in enumerate(slots.tolist()):
        span = slice(int(starts[i]), int(starts[i + 1]))
        history = torch.zeros(width - 1, DIM)
        if resumed[i] and slot >= 0:
            history = states[slot, :, : width - 1].t()
        out, last = convolved(history, x[:, span].t(), weight, bias, silu)
        expected[:, span] = out.t()
        if slot >= 0:
            expected_states[slot, :, : width - 1] = last.t()
    actual = conv1d.causal_conv1d_fn_cpu(
        x, weight, bias, "silu" if silu else None, states, resumed, slots, starts, lengths
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(states, expected_states)


@pytest.mark.parametrize("tokens", [None, 1, 3, 6])
def test_convolution_of_the_next_tokens(tokens: int | None) -> None:
    batch, width = 3, 4
    shape = (batch, DIM) if tokens is None else (batch, DIM, tokens)
    x, weight, bias = torch.randn(shape), torch.randn(DIM, width), torch.randn(DIM)
    states = torch.randn(SLOTS, DIM, width - 1)
    expected_states, expected = states.clone(), x.clone()
    slots = torch.tensor([4, -1, 1])
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        line = x[i].view(DIM, -1).t()
        out, last = convolved(states[slot].t(), line, weight, bias, True)
        expected[i] = out.t().view(x[i].shape)
        expected_states[slot] = last.t()
    actual = conv1d.causal_conv1d_update_cpu(x, states, weight, bias, "silu", slots)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(states, expected_states)


def test_convolution_token_by_token_equals_the_whole_sequence() -> None:
    x, weight = torch.randn(DIM, 9), torch.randn(DIM, 4)
    whole_states, states = torch.zeros(2, 1, DIM, 3).unbind(0)
    whole = conv1d.causal_conv1d_fn_cpu(
        x, weight, None, "silu", whole_states, None, torch.tensor([0]), torch.tensor([0, 9])
    )
    stepwise = [
        conv1d.causal_conv1d_update_cpu(x[:, t].unsqueeze(0), states, weight, None, "silu")
        for t in range(9)
    ]
    torch.testing.assert_close(torch.cat(stepwise).t(), whole)
    assert torch.equal(states, whole_states)


HEADS, KEY_HEADS, KEY, VALUE = 4, 2, 3, 5


def delta_loop(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """One head: state [value, key] in place; q, k [tokens, key]; v [tokens, value]."""
    out = []
    for t in range(q.shape[0]):
        unit_q = q[t] / math.sqrt(float((q[t] ** 2).sum()) + 1e-6)
        unit_k = k[t] / math.sqrt(float((k[t] ** 2).sum()) + 1e-6)
        state *= math.exp(float(g[t]))
        state += float(beta[t]) * torch.outer(v[t] - state @ unit_k, unit_k)
        out.append(state @ unit_q / math.sqrt(KEY))
    return torch.stack(out) if out else q.new_zeros(0, VALUE)


@pytest.mark.parametrize("lengths", [[4], [3, 0, 6, 1]])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_chunk_gated_delta_rule(lengths: list[int], pool_dtype: torch.dtype) -> None:
    batch, tokens = len(lengths), sum(lengths)
    q, k = torch.randn(2, 1, tokens, KEY_HEADS, KEY).unbind(0)
    v = torch.randn(1, tokens, HEADS, VALUE)
    g, beta = -torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS)
    pool = torch.randn(SLOTS, HEADS, VALUE, KEY).to(pool_dtype)
    expected_pool, expected = pool.float().clone(), torch.zeros_like(v)
    slots = torch.tensor([3, 1, -1, 5][:batch])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for i, slot in enumerate(slots.tolist()):
        span = slice(int(starts[i]), int(starts[i + 1]))
        for head in range(HEADS):
            key_head = head // (HEADS // KEY_HEADS)
            state = expected_pool[slot, head].clone() if slot >= 0 else torch.zeros(VALUE, KEY)
            expected[0, span, head] = delta_loop(
                state,
                q[0, span, key_head],
                k[0, span, key_head],
                v[0, span, head],
                g[0, span, head],
                beta[0, span, head],
            )
            if slot >= 0:
                expected_pool[slot, head] = state
    out, last, _ = delta_rule.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, pool, starts, False, True, slots
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool, expected_pool.to(pool_dtype), rtol=1e-4, atol=1e-5)
    assert last.shape == (batch, HEADS, VALUE, KEY)


def test_decode_step_computes_its_gates_and_continues_the_sequence() -> None:
    tokens = 5
    q, k = torch.randn(2, 1, tokens, KEY_HEADS, KEY).unbind(0)
    v = torch.randn(1, tokens, HEADS, VALUE)
    a, b = torch.randn(2, tokens, HEADS).unbind(0)
    a_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS)
    a[0, 0] = 40.0  # softplus is linear out here
    g, beta = delta_rule.fused_gdn_gating_cpu(a_log, a, b, dt_bias)
    for t in range(tokens):
        for head in range(HEADS):
            softplus = math.log1p(math.exp(float(a[t, head] + dt_bias[head])))
            assert float(g[0, t, head]) == pytest.approx(
                -math.exp(float(a_log[head])) * softplus, rel=1e-4
            )
            assert float(beta[0, t, head]) == pytest.approx(
                1 / (1 + math.exp(-float(b[t, head]))), rel=1e-5
            )
    slot, starts = torch.tensor([1]), torch.tensor([0, tokens])
    whole_pool, pool = torch.zeros(2, SLOTS, HEADS, VALUE, KEY).unbind(0)
    whole, _, _ = delta_rule.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, whole_pool, starts, False, True, slot
    )
    steps = [
        delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
            a_log,
            dt_bias,
            q[:, t : t + 1],
            k[:, t : t + 1],
            v[:, t : t + 1],
            a[t : t + 1],
            b[t : t + 1],
            pool,
            slot,
            torch.tensor([0, 1]),
            True,
        )
        for t in range(tokens)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    torch.testing.assert_close(pool, whole_pool)


def test_head_first_layout_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="head_first: expected False, found True"):
        delta_rule.chunk_gated_delta_rule_cpu(
            x, x, x, x[0], x[0], x, torch.tensor([0, 1]), True, True, torch.tensor([0])
        )
