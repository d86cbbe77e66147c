"""Commands that start servers of their own: lossless and calibrate, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.core.spec.sps import AdditiveTable, SpsTable, load_table
from tests.e2e.servers import BASE_ENV, speculation
from tests.e2e.stand import COMMON, STEADY, Stand
from tests.e2e.test_launch import processes_with

pytestmark = pytest.mark.e2e


def _model(stand: Stand) -> list[str]:
    return [str(w) for w in ("--model-path", stand.checkpoints.target("llama"), *COMMON)]


def _drafting(stand: Stand) -> list[str]:
    return [*_model(stand), *map(str, speculation("DSPARK", stand.checkpoints.dspark(), 4))]


def _run(words: Sequence[object], monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> str:
    """Output of a command that ends with 0 and leaves no process."""
    mark = f"mark-of-{id(words)}-{words[0]}"
    for name, value in {**BASE_ENV, **env, "SGLANG_EXT_TEST_MARK": mark}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert processes_with(mark) == []
    return done.output


def test_lossless_starts_both_servers(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, port = tmp_path / "out.json", stand.pool.next_port()
    quick = ("--only", "greedy", "--limit", 2, "--tokens", 16, "--concurrency", "1,2", "--quiet")
    head = ("lossless", *quick, "--first-port", port, "--json", out, "--")
    _run([*head, *_drafting(stand)], monkeypatch, STEADY)
    found = json.loads(out.read_text())
    assert (found["base"]["algorithm"], found["spec"]["algorithm"]) == ("", "DSPARK")
    assert {outcome["state"] for outcome in found["outcomes"]} == {"pass"}


def test_calibrate_has_a_server_measure_itself(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, port = tmp_path / "sps.json", stand.pool.next_port()
    head = ("calibrate", "sps", "--out", out, "--first-port", port, "--")
    said = _run([*head, *_drafting(stand)], monkeypatch, {})
    assert f"wrote {out}" in said
    assert isinstance(load_table(out), SpsTable | AdditiveTable)
