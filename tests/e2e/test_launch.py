"""`sglang-ext launch` starts real servers, explains a failed start, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import BASE_ENV
from tests.e2e.stand import Stand
from tests.tiny import make_draft, make_target

pytestmark = pytest.mark.e2e
READY = 240
PRESETS = {
    "demo-cpu-low-latency": "DSPARK",
    "demo-cpu-balanced": "DFLASH",
    "demo-cpu-max-throughput": "",
    "demo-cpu-long-context": "DSPARK",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("launch")
    target = make_target(folder / "target")
    drafts = {a: make_draft(folder / a, a, target, gamma=4) for a in ("DSPARK", "DFLASH")}
    return {"target": target, **drafts}


def _command(preset: str, port: int, *words: str) -> list[str]:
    head = [sys.executable, "-m", "sglang_ext.cli", "launch", preset, "--set", f"port={port}"]
    return [*head, *words]


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **BASE_ENV},
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def wait_until_up(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and " is up;" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.5)
    assert " is up;" in log.read_text(), log.read_text()


def processes_with(words: str) -> list[int]:
    """Processes whose command line or environment names this launch."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if words.encode() in text and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def _answers(port: int) -> str:
    body = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    url = f"http://127.0.0.1:{port}/generate"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["text"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_serves_and_ctrl_c_leaves_no_process(
    preset: str, tiny: dict[str, Path], stand: Stand, tmp_path: Path
) -> None:
    """The CPU presets over a tiny target: same parts and flags as with the built-in model."""
    mark = f"SGLANG_EXT_TEST_MARK={tmp_path}"
    words = ["--set", f"model-path={tiny['target']}", "--set", mark, "--set", "dtype=float32"]
    if PRESETS[preset]:
        words += ["--set", f"speculative-draft-model-path={tiny[PRESETS[preset]]}"]
    log, port = tmp_path / "launch.log", stand.pool.next_port()
    with running(_command(preset, port, *words, "--set", "max-total-tokens=4096"), log) as process:
        wait_until_up(process, log)
        assert _answers(port)
        assert processes_with(mark)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    assert processes_with(mark) == []


def test_a_failed_start_is_explained(stand: Stand, tmp_path: Path) -> None:
    words = ["--set", f"model-path={tmp_path / 'nothing'}"]
    done = subprocess.run(
        _command("demo-cpu-max-throughput", stand.pool.next_port(), *words),
        capture_output=True, text=True, timeout=READY,
        env={**os.environ, **BASE_ENV, "TMPDIR": tempfile.mkdtemp(dir=tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "checkpoint missing" in done.stderr
    assert "--set model-path=" in done.stderr
    assert re.search(r"Log: \S+\.log", done.stderr)
