"""What commands print, to the letter: SGLANG_EXT_GOLDEN=write writes tests/golden anew."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext.cli import app

FOLDER = Path(__file__).resolve().parents[1] / "golden"
EMIT = "launch deepseek-v3.2-2x8xh100-balanced --emit"
TABLES = ("mtp", "break-even", "dsa", "schedule")
KINDS = ("yaml", "bash", "slurm", "k8s-lws", "ray")
COMMANDS = {
    "plan": "plan --model qwen3-8b --hardware 8xh100 --explain",
    **{f"table-{name}": f"plan --table {name}" for name in TABLES},
    "validate": "plan --validate results.jsonl",
    "launch-list": "launch --list",
    **{f"emit-{kind}": f"{EMIT} {kind}" for kind in KINDS},
    "lossless-help": "lossless --help",
    "bench-help": "bench --help",
    "calibrate-sts": "calibrate sts rounds.jsonl",
}


def _write_inputs(folder: Path) -> None:
    results = [
        {
            "model": "deepseek-v3.2", "hardware": "8xh200", "throughput": speed, "tpot_ms": 20.0,
            "layout": {"replicas": 1, "tp": 8, "dp": dp}, "source": "made up",
            "load": {"input_tokens": 1000, "output_tokens": 500, "concurrency": requests},
        }
        for dp, requests, speed in ((1, 4, 300.0), (8, 4, 250.0), (1, 64, 1500.0), (8, 64, 2500.0))
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results))
    drawn = random.Random(1)
    rounds = [
        {"logits": [drawn.randint(-20, 30) / 10 for _ in range(2)], "accepted": drawn.randint(0, 2)}
        for _ in range(240)
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    plain = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "OPENAI_API_KEY": ""}
    result = CliRunner().invoke(app, shlex.split(COMMANDS[name]), env=plain)
    assert result.exit_code == 0, result.output
    said = result.output
    if name.endswith("help"):
        # Its frame is the typesetter's, and differs by its version.
        said = "\n".join(re.sub("[─-╿]", " ", line).rstrip() for line in said.splitlines()) + "\n"
    golden = FOLDER / f"{name}.txt"
    if os.environ.get("SGLANG_EXT_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        golden.write_text(said, encoding="utf-8")
    assert said == golden.read_text(encoding="utf-8")


def test_every_golden_file_is_of_a_command() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(COMMANDS)
