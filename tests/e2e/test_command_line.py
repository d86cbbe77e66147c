"""The commands a user types, as they are: spawned ranks load the plugin by themselves."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import Client, greedy
from tests.e2e.servers import group_is_gone, speculation
from tests.e2e.stand import COMMON, Stand
from tests.e2e.workload import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
START_SECONDS = 600


def _environment() -> dict[str, str]:
    """The caller's, without anything that steers SGLang or sglang-ext."""
    foreign = ("SGLANG", "SGL_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def _running(command: Sequence[object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=log.parent,
            env=_environment(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _wait(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health", timeout=10).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


@pytest.mark.parametrize(
    ("command", "algorithm"),
    [(LAUNCH, "DSPARK"), (SERVE, "DFLASH")],
    ids=["launch_server", "serve"],
)
def test_serves(stand: Stand, command: Sequence[str], algorithm: str, tmp_path: Path) -> None:
    name = {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm]
    target = stand.checkpoints.target("llama")
    draft = stand.checkpoints.draft(algorithm, name)
    prompt = random_prompt(17, 12)
    expected = stand.plain().generate(prompt, greedy(40, ignore_eos=True))
    port = stand.pool.next_port()
    flags = (*COMMON, *speculation(algorithm, draft), "--host", "127.0.0.1", "--port", port)
    log = tmp_path / "server.log"
    with _running((*command, "--model-path", target, *flags), log) as process:
        client = Client(f"http://127.0.0.1:{port}")
        _wait(client, process, log)
        reply = client.generate(prompt, greedy(40, ignore_eos=True))
        client.close()
    assert reply.ids == expected.ids
    assert f"{algorithm}: our worker" in log.read_text()
    assert group_is_gone(process.pid)


def test_a_tiny_v4_is_made_and_served_as_printed(stand: Stand, tmp_path: Path) -> None:
    """docs/deepseek_v4.md: default layers and dtype; with a port, and less memory for the cache."""
    page = (Path(__file__).parents[2] / "docs" / "deepseek_v4.md").read_text(encoding="utf-8")
    make, serve = (shlex.split(line) for line in page.split("```")[1].strip().splitlines())
    assert make == ["sglang-ext", "tiny-model", "deepseek-v4", "--out", "./v4"]
    made = [sys.executable, "-m", "sglang_ext.cli", *make[1:]]
    subprocess.run(made, cwd=tmp_path, env=_environment(), check=True, capture_output=True)
    assert serve[:3] == ["python", "-m", "sglang.launch_server"]
    assert serve[3:] == ["--model-path", "./v4", "--speculative-algorithm", "DSPARK"]
    port, log = stand.pool.next_port(), tmp_path / "server.log"
    command = (*LAUNCH, *serve[3:], "--port", port, "--max-total-tokens", 4096)
    with _running(command, log) as process:
        client = Client(f"http://127.0.0.1:{port}")
        _wait(client, process, log)
        reply = client.generate("Once upon a time", greedy(40, ignore_eos=True))
        client.close()
    assert len(reply.ids) == 40
    # 40 tokens, one of them from the prompt; a round is one verification of what was drafted.
    assert 0 < sum(reply.accepted) == reply.meta["spec_verify_ct"] <= 39
    assert "DSPARK: our worker" in log.read_text()
    assert group_is_gone(process.pid)


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH"])
def test_refuses(stand: Stand, algorithm: str, tmp_path: Path) -> None:
    """A draft of the other algorithm: the real command ends with an error and leaves nothing."""
    other = {"DSPARK": "zlab", "DFLASH": "vanilla"}[algorithm]
    draft = stand.checkpoints.draft("DFLASH" if algorithm == "DSPARK" else "DSPARK", other)
    flags = (*COMMON, *speculation(algorithm, draft), "--port", stand.pool.next_port())
    command = (*LAUNCH, "--model-path", stand.checkpoints.target("llama"), *flags)
    log = tmp_path / "server.log"
    with _running(command, log) as process:
        code = process.wait(START_SECONDS)
    assert code != 0
    assert "markov_rank: expected" in log.read_text()
    assert "Uvicorn running" not in log.read_text()
    assert group_is_gone(process.pid)
