"""Survivals, calibration error and sequential temperature scaling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_ext.core.spec.calibration import (
    StsTemperatures,
    calibration_error,
    fit_temperatures,
)
from sglang_ext.core.spec.confidence import survivals
from sglang_ext.core.spec.errors import TableError


def test_survival_is_the_product_of_the_scaled_confidences() -> None:
    logits, temperatures = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([2.0, 0.5, 1.0])
    c = [torch.sigmoid(logits[0, k] / temperatures[k]) for k in range(3)]
    expected = torch.stack([c[0], c[0] * c[1], c[0] * c[1] * c[2]])
    torch.testing.assert_close(survivals(logits, temperatures)[0], expected)


def ece_by_hand(predicted: list[float], happened: list[int], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [
            i
            for i, p in enumerate(predicted)
            if b / bins <= p < (b + 1) / bins or (b == bins - 1 and p == 1.0)
        ]
        if inside:
            confidence = sum(predicted[i] for i in inside) / len(inside)
            accuracy = sum(happened[i] for i in inside) / len(inside)
            total += len(inside) * abs(confidence - accuracy)
    return total / len(predicted)


def test_calibration_error_equals_the_sum_over_bins() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.cat((torch.rand(97, generator=generator), torch.tensor([0.0, 1.0])))
    happened = (torch.rand(99, generator=generator) < 0.4).long()
    expected = ece_by_hand(predicted.double().tolist(), happened.tolist(), 15)
    assert calibration_error(predicted, happened) == pytest.approx(expected)


def test_fit_recovers_the_temperatures_that_spoiled_the_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(40_000, 3, generator=generator) + 1.0
    kept = torch.rand(40_000, 3, generator=generator) < true.sigmoid()
    spoiled = true * torch.tensor([3.0, 0.4, 1.0])
    fit = fit_temperatures(spoiled, kept.long().cumprod(1), "made up")
    assert fit.temperatures == pytest.approx((3.0, 0.4, 1.0), rel=0.15)
    assert fit.num_samples == 40_000
    for before, after in zip(fit.ece_before, fit.ece_after, strict=True):
        assert after <= before
    assert max(fit.ece_after) < 0.01 < fit.ece_before[0]


def test_the_first_of_equal_temperatures_wins() -> None:
    # A logit of 0 stays one half at every temperature.
    fit = fit_temperatures(torch.zeros(4, 1), torch.tensor([[1], [0], [1], [0]]))
    assert fit.temperatures == pytest.approx((0.1,))


def test_round_trip_and_the_prefix_for_a_shorter_gamma(tmp_path: Path) -> None:
    table = StsTemperatures((1.0, 2.0, 0.5), "set", 10, (0.1, 0.2, 0.3), (0.0, 0.1, 0.2))
    table.save(tmp_path / "sts.json")
    assert StsTemperatures.load(tmp_path / "sts.json") == table
    assert table.tensor(2).tolist() == [1.0, 2.0]
    with pytest.raises(TableError, match=r"temperatures.*at least 4 \(gamma\).*3 numbers"):
        table.tensor(4)


def test_temperatures_alone_are_a_file(tmp_path: Path) -> None:
    (tmp_path / "sts.json").write_text('{"temperatures": [1, 2]}')
    assert StsTemperatures.load(tmp_path / "sts.json").temperatures == (1.0, 2.0)


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("temperatures", {}),
        ("temperatures", {"temperatures": []}),
        ("temperatures", {"temperatures": [1.0, 0.0]}),
        ("temperatures", {"temperatures": [1.0, float("nan")]}),
        ("temperatures", {"temperatures": [1.0, float("inf")]}),
        ("temperatures", {"temperatures": [1.0, "2"]}),
        ("temperatures", {"temperatures": 1.0}),
        ("ece_after", {"temperatures": [1.0], "ece_after": [0.1, 0.2]}),
        ("num_samples", {"temperatures": [1.0], "num_samples": 1.5}),
        ("dataset", {"temperatures": [1.0], "dataset": 3}),
        ("temperature", {"temperatures": [1.0], "temperature": [1.0]}),
    ],
)
def test_a_bad_file_is_refused_by_field(field: str, content: object, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=rf"STS file, {field}: expected .* found .*\. \w"):
        StsTemperatures.load(path)


def test_logits_and_mask_must_match() -> None:
    with pytest.raises(TableError, match="prefix_mask"):
        fit_temperatures(torch.zeros(3, 2), torch.zeros(3, 1))
