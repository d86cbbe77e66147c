"""The newcomer's page: its commands are taken from the page itself."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.launcher.paths import demo_folder_names
from tests.e2e.stand import Stand
from tests.e2e.test_launch import processes_with, running, wait_until_up

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
PRINTED_PORT = "30100"
# Seconds each, without a server. `doctor` runs apart: it changes the process that runs it.
QUICK = ("demo prepare", "plan", "launch my-plan", "launch deepseek")


def _commands() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def _ours() -> list[list[str]]:
    return [shlex.split(c)[1:] for c in _commands() if c.startswith("sglang-ext ")]


def test_every_command_is_one_that_this_version_takes() -> None:
    assert len(_ours()) == 11
    for words in _ours():
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)


@pytest.fixture
def built_in() -> None:
    if not (Path(demo_folder_names()["target"]) / "config.json").is_file():
        pytest.skip("`sglang-ext demo prepare` has not made the built-in model here")


def test_what_takes_seconds_works_as_printed(
    built_in: None, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [w for w in _ours() if any(shlex.join(w).startswith(start) for start in QUICK)]
    assert len(chosen) == 6
    for words in chosen:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)
    assert (tmp_path / "my-plan.yaml").is_file()


def test_doctor_works_as_printed() -> None:
    assert ["doctor"] in _ours()
    command = [sys.executable, "-m", "sglang_ext.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "whose code answers here:" in done.stdout
    assert "Warning" not in done.stderr


def test_the_server_of_the_page_answers_and_leaves_nothing(
    built_in: None, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed but for the port and less memory for the cache."""
    mark, log = f"SGLANG_EXT_TEST_MARK={tmp_path}", tmp_path / "launch.log"
    port = str(stand.pool.next_port())
    (words,) = (w for w in _ours() if w[:2] == ["launch", "demo-cpu-low-latency"])
    words = [word.replace(PRINTED_PORT, port) for word in words]
    more = ["--set", mark, "--set", "max-total-tokens=4096"]
    (curl,) = (c for c in _commands() if c.startswith("curl "))
    with running([sys.executable, "-m", "sglang_ext.cli", *words, *more], log) as process:
        wait_until_up(process, log)
        if shutil.which("curl"):
            asked = shlex.split(curl.replace(PRINTED_PORT, port))
            answer = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
            assert answer["text"].strip()
            assert answer["meta_info"]["spec_accept_length"] >= 1
        (check,) = (w for w in _ours() if w[:2] == ["lossless", "--self"])
        # As printed, but for the port and a quarter of the prompts.
        asked = [word.replace(PRINTED_PORT, port) for word in check]
        asked[asked.index("--limit") + 1] = "2"
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 0, done.output
        assert (tmp_path / "lossless.html").is_file()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert processes_with(mark) == []
