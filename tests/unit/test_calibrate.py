"""`sglang-ext calibrate`: tables from grids, temperatures from recordings, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from sglang_ext.calibrate.sps import additive_table, sps_table
from sglang_ext.calibrate.sts import LEAST_ROUNDS, fit, read, reliability
from sglang_ext.cli import app
from sglang_ext.core.spec.calibration import StsTemperatures
from sglang_ext.core.spec.speed_grid import SpeedGrid
from sglang_ext.core.spec.sps import load_table

REQUESTS, ROWS = (1, 2, 4, 8), (1, 2, 5)


def _grid(bias: float = 1e-2, per_request: float = 2e-3, per_row: float = 5e-4) -> SpeedGrid:
    """A machine that is additive by construction."""
    verify = tuple(tuple(bias + per_request * b + per_row * b * n for n in ROWS) for b in REQUESTS)
    return SpeedGrid(REQUESTS, ROWS, verify, tuple(1e-3 for _ in REQUESTS))


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, args)])


def test_additive_table_reproduces_an_additive_machine() -> None:
    grid = _grid()
    table, off = additive_table(grid)
    assert off < 1e-6
    for b, row in zip(grid.requests, grid.verify_seconds, strict=True):
        for n, seconds in zip(grid.rows, row, strict=True):
            assert float(table.seconds(b, b * n)[-1]) == pytest.approx(seconds, rel=1e-6)


def test_sps_table_holds_the_measured_sizes() -> None:
    grid = _grid(per_request=0.0)
    table = sps_table(grid)
    for b, row in zip(grid.requests, grid.verify_seconds, strict=True):
        for n, seconds in zip(grid.rows, row, strict=True):
            assert float(table.seconds(b, b * n)[-1]) == pytest.approx(seconds, rel=1e-6)
    assert all(np.diff(table.sample_steps_per_sec) <= 0)


@pytest.mark.parametrize("flags", [(), ("--additive",)])
def test_sps_from_a_grid_file(tmp_path: Path, flags: tuple[str, ...]) -> None:
    _grid().save(tmp_path / "grid.json")
    out = tmp_path / "sps.json"
    result = _run("sps", "--grid", tmp_path / "grid.json", "--out", out, *flags)
    assert result.exit_code == 0, result.output
    assert float(load_table(out).seconds(1, 1)[0]) > 0


def _rounds(count: int, scale: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are `scale` times too sure: [n, 3] and drafts accepted [n]."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(count, 3, generator=generator) + 0.5
    kept = torch.rand(count, 3, generator=generator) < torch.sigmoid(true)
    return true * scale, kept.long().cumprod(1).sum(1)


def _write(path: Path, logits: torch.Tensor, accepted: torch.Tensor) -> Path:
    rows = zip(logits.tolist(), accepted.tolist(), strict=True)
    path.write_text("".join(json.dumps({"logits": r, "accepted": n}) + "\n" for r, n in rows))
    return path


def test_temperatures_undo_overconfidence(tmp_path: Path) -> None:
    logits, accepted = _rounds(20_000, 2.0, 1)
    file = _write(tmp_path / "log.1.jsonl", logits, accepted)
    out, plot = tmp_path / "sts.json", tmp_path / "plot.png"
    result = _run("sts", file, "--out", out, "--name", "simulated", "--plot", plot)
    assert result.exit_code == 0, result.output
    fitted = StsTemperatures.load(out)
    assert fitted.temperatures == pytest.approx([2.0] * 3, rel=0.3)
    assert all(a < b for a, b in zip(fitted.ece_after, fitted.ece_before, strict=True))
    assert plot.read_bytes().startswith(b"\x89PNG")
    recorded = read([file])
    before = reliability(recorded, None)[0]
    after = reliability(recorded, fitted.tensor(3).double())[0]
    gaps = [
        sum(n * abs(p - o) for n, p, o in zip(d.counts, d.predicted, d.observed, strict=True))
        for d in (before, after)
    ]
    assert gaps[1] < gaps[0] / 2


def test_reads_shards_and_lines_together(tmp_path: Path) -> None:
    logits, accepted = _rounds(400, 1.0, 2)
    _write(tmp_path / "a.jsonl", logits[:200], accepted[:200])
    mask = (torch.arange(3) < accepted[200:, None]).float()
    torch.save({"logits": logits[200:], "prefix_mask": mask}, tmp_path / "b.0.pt")
    found = read([tmp_path])
    assert torch.equal(found.logits, logits)
    assert torch.equal(found.prefix_mask.sum(1).long(), accepted)
    assert fit(found, "both").num_samples == 400


BAD_LINES = {
    "{": "expected JSON",
    "[]": "expected logits",
    '{"logits": [], "accepted": 0}': "expected logits",
    '{"logits": [1, "x", 2], "accepted": 0}': "expected logits",
    '{"logits": [1, NaN, 2], "accepted": 0}': "expected logits",
    f'{{"logits": [1, {10**400}, 2], "accepted": 0}}': "expected logits",
    '{"logits": [1, 1e39, 2], "accepted": 0}': "expected logits",
    "[" * 100_000: "expected JSON",
    '{"logits": [1, 2, 3], "accepted": 4}': "expected accepted, 0 to 3",
    '{"logits": [1, 2, 3], "accepted": true}': "expected accepted, 0 to 3",
    '{"logits": [1, 2], "accepted": 1}': "expected 3 logits",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_refuses_a_bad_line(tmp_path: Path, line: str) -> None:
    logits, accepted = _rounds(LEAST_ROUNDS, 1.0, 3)
    file = _write(tmp_path / "log.jsonl", logits, accepted)
    file.write_text(file.read_text() + line + "\n")
    result = _run("sts", file, "--out", tmp_path / "sts.json")
    assert result.exit_code == 2
    assert f"line {LEAST_ROUNDS + 1}: {BAD_LINES[line]}" in result.output
    assert not (tmp_path / "sts.json").exists()


def test_an_empty_recording_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", *_rounds(LEAST_ROUNDS, 1.0, 3))
    (tmp_path / "b.jsonl").touch()
    result = _run("sts", tmp_path, "--out", tmp_path / "sts.json")
    assert result.exit_code == 2
    assert f"{tmp_path / 'b.jsonl'}: expected a round a line, found none" in result.output


@pytest.mark.parametrize("names", [("x.png", "x.png"), ("a.jsonl", "x.png"), ("./x.png", "x.png")])
def test_no_file_is_written_over_another(tmp_path: Path, names: tuple[str, str]) -> None:
    file = _write(tmp_path / "a.jsonl", *_rounds(LEAST_ROUNDS, 1.0, 3))
    kept = file.read_text()
    out, plot = (tmp_path / name for name in names)
    result = _run("sts", file, "--out", out, "--plot", plot)
    assert result.exit_code == 2
    assert "expected another file than" in result.output
    assert file.read_text() == kept


def test_refuses(tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text("{]")
    (tmp_path / "bad.pt").write_bytes(b"no shard")
    few = _write(tmp_path / "few.jsonl", *_rounds(5, 1.0, 4))
    refusals = {
        ("sps", "--grid", tmp_path / "grid.json"): "expected a speed grid",
        ("sps",): "found neither",
        ("sps", "--grid", tmp_path / "grid.json", "--", "--x"): "found both",
        ("sps", "--", "--model-path", "x"): "expected --speculative-algorithm",
        ("sts", tmp_path / "none"): "expected a .jsonl or .pt file",
        ("sts", tmp_path / "bad.pt"): "expected logits and prefix_mask",
        ("sts", few): f"expected at least {LEAST_ROUNDS}",
        ("sts", few, "--out", "/no/such/folder/x"): "--out: expected a file",
    }
    for args, message in refusals.items():
        result = _run(*args)
        assert result.exit_code == 2, args
        assert message in result.output, (args, result.output)
