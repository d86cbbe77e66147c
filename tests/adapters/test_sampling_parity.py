"""Our sampling law and seeded draws against SGLang's own PyTorch sampler, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from sglang.srt.layers import sampler
from torch import Tensor

from sglang_ext.core.spec.sampling import SamplingRows, seeded_sample, target_probs

VOCAB, ROWS = 1009, 6
FILTERS = [
    params
    for params in itertools.product([0.7, 1.0], [-1, 1, 20], [1.0, 0.9], [0.0, 0.05])
    if params[1:] != (-1, 1.0, 0.0)
]


def logits(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def rows(params: tuple[float, int, float, float]) -> SamplingRows:
    return SamplingRows.of(*([x] * ROWS for x in params))


def sglang_arguments(
    raw: Tensor, params: tuple[float, int, float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, k, p, m = params
    probs = torch.softmax(raw / torch.full((ROWS, 1), temperature), dim=-1)
    top_k = torch.full((ROWS,), sampler.TOP_K_ALL if k == -1 else k, dtype=torch.int32)
    return probs, top_k, torch.full((ROWS,), p), torch.full((ROWS,), m)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_law_has_the_support_and_weights_of_sglang(
    params: tuple[float, int, float, float],
) -> None:
    raw = logits()
    _, weights, ids, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        *sglang_arguments(raw, params),
        params[3] > 0,
        None,
        torch.zeros(ROWS),
        return_filtered_probs=True,
    )
    expected = torch.zeros(ROWS, VOCAB).scatter_(1, ids.long(), weights)
    got = target_probs(raw, rows(params))
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected / expected.sum(-1, keepdim=True))


def test_the_plain_law_is_the_softmax_that_sglang_samples() -> None:
    raw = logits()
    assert torch.equal(
        target_probs(raw, rows((0.7, -1, 1.0, 0.0))),
        torch.softmax(raw.clone().div_(torch.full((ROWS, 1), 0.7)), dim=-1),
    )


def keys(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, 2**31, (ROWS,), generator=generator)
    return seeds, torch.randint(0, 4096, (ROWS,), generator=generator)


@pytest.mark.parametrize("seed", range(20))
def test_seeded_draws_without_filters_are_sglangs(seed: int) -> None:
    raw, (seeds, positions) = logits(seed), keys(seed)
    probs = torch.softmax(raw / torch.full((ROWS, 1), 0.8), dim=-1)
    with torch.compiler.set_stance("force_eager"):
        expected = sampler.sampling_from_probs_torch(probs, seeds, positions)
    got = seeded_sample(raw, rows((0.8, -1, 1.0, 0.0)), seeds, positions)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("params", [f for f in FILTERS if f[3] == 0.0], ids=str)
def test_seeded_draws_with_filters_are_sglangs(params: tuple[float, int, float, float]) -> None:
    raw, (seeds, positions) = logits(), keys(1)
    with torch.compiler.set_stance("force_eager"):
        expected = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            *sglang_arguments(raw, params), False, seeds, positions
        )
    assert seeded_sample(raw, rows(params), seeds, positions).tolist() == expected.tolist()
