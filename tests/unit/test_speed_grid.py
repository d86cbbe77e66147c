"""Speed grid: interpolation between what was measured, monotone in rows, strict on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.core.spec.errors import TableError
from sglang_ext.core.spec.speed_grid import SpeedGrid

GRID = SpeedGrid((1, 4), (1, 3, 8), ((1.0, 2.0, 4.5), (2.0, 5.0, 4.0)), (0.5, 0.8))


def test_measured_points_come_back() -> None:
    assert GRID.decode(1) == 1.0
    assert GRID.decode(4) == 2.0
    assert GRID.draft(4) == 0.8
    assert GRID.seconds(1, 3).tolist() == [1.0, 1.5, 2.0]


def test_between_batch_sizes_and_rows() -> None:
    assert GRID.decode(2) == pytest.approx(1.0 + 1 / 3)
    assert GRID.seconds(2, 6)[-1] == pytest.approx(2.0 + (5.0 - 2.0) / 3)


def test_time_never_falls_with_rows() -> None:
    for requests in (1, 2, 3, 4, 7):
        assert (np.diff(GRID.seconds(requests, 8 * requests)) >= 0).all()


def test_beyond_the_largest_batch_time_grows_in_proportion() -> None:
    assert GRID.decode(8) == pytest.approx(4.0)
    assert GRID.draft(8) == pytest.approx(1.6)


def test_round_trip(tmp_path: Path) -> None:
    GRID.save(tmp_path / "grid.json")
    assert SpeedGrid.load(tmp_path / "grid.json") == GRID


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests", [4, 1]),
        ("rows", [2, 3, 8]),
        ("verify_seconds", [[1.0, 2.0, 4.5]]),
        ("verify_seconds", [[1.0, 2.0, 4.5], [2.0, 5.0, 0.0]]),
        ("draft_seconds", [0.5]),
        ("draft_seconds", [0.5, -1.0]),
        ("surplus", 1),
    ],
)
def test_a_corrupt_file_names_the_field(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "grid.json"
    GRID.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(TableError) as caught:
        SpeedGrid.load(path)
    assert caught.value.field == field
