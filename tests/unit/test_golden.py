"""What commands print, to the letter: SGLANG_EXT_GOLDEN=write writes tests/golden anew."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext.bench_cli.grid import Dataset, points, settings
from sglang_ext.bench_cli.results import Results
from sglang_ext.bench_cli.tools import Load
from sglang_ext.cli import app
from sglang_ext.lossless.report import NOT_SHOWN

FOLDER = Path(__file__).resolve().parents[1] / "golden"
EMIT = "launch deepseek-v3.2-2x8xh100-balanced --emit"
TABLES = ("mtp", "break-even", "dsa", "schedule")
# Exit codes other than 0.
CODES = {"launch-absent": 2}
KINDS = ("yaml", "bash", "slurm", "k8s-lws", "ray")
COMMANDS = {
    "plan": "plan --model qwen3-8b --hardware 8xh100 --explain",
    **{f"table-{name}": f"plan --table {name}" for name in TABLES},
    "validate": "plan --validate results.jsonl",
    "launch-list": "launch --list",
    "launch-dry-run": "launch deepseek-v3.2-2x8xh100-balanced --dry-run",
    "launch-absent": "launch deepseek-v4-pro-8xh100-max-throughput",
    **{f"emit-{kind}": f"{EMIT} {kind}" for kind in KINDS},
    "lossless-help": "lossless --help",
    "bench-help": "bench --help",
    "bench": "bench --with NGRAM --concurrency 1,4 --out bench.json --markdown bench.md "
    "-- --model-path org/model --dtype bfloat16",
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


def _write_bench(file: Path) -> None:
    """Everything that the command asks for has been measured, elsewhere."""
    argv, load = ["--model-path", "org/model", "--dtype", "bfloat16"], Load()
    results = Results(file, argv, load)
    results.data["machine"] = {
        "device": "CPU", "processor": "x86_64", "cpu": "Some CPU at 2.00 GHz", "cpus": 2,
        "threads": 2, "sglang": "0.5.23", "sglang_ext": "0.1.0", "torch": "2.14.0",
    }  # fmt: skip
    chosen = settings(["NGRAM"], [None])
    for speed, point in enumerate(points(chosen, [Dataset("random")], (1, 4)), start=10):
        drafts = {"acceptance_length": 1.5} if point.setting.algorithm != "none" else {}
        figures = {"output_tokens_per_second": speed, "median_tpot_ms": 1e3 / speed}
        figures |= {"median_ttft_ms": 20.0, "completed": 32, "input_tokens": 256}
        results.keep_point(point, figures | drafts)
    for point in points(chosen[:1], [Dataset("random")], (1, 4)):
        first = results.data["points"][point.key]["output_tokens_per_second"]
        results.keep_point(point, {"output_tokens_per_second": 1.2 * first}, part="again")
    for point in (*results.data["points"].values(), *results.again.values()):
        point["load_average"] = 1.0
    gate = asdict(chosen[1]) | {"exit_code": 0, "statement": f"lossless; {NOT_SHOWN}"}
    results.data["gates"] = {chosen[1].key: gate}
    file.write_text(json.dumps(results.data))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_inputs(tmp_path)
    if name == "bench":
        _write_bench(tmp_path / "bench.json")
    monkeypatch.chdir(tmp_path)
    plain = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "OPENAI_API_KEY": ""}
    result = CliRunner().invoke(app, shlex.split(COMMANDS[name]), env=plain)
    assert result.exit_code == CODES.get(name, 0), result.output
    said = result.output + (Path("bench.md").read_text() if name == "bench" else "")
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
