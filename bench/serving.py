"""Servers under measurement: started as a user starts them, spoken to over HTTP, ended for good."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 600
GREEDY = {"temperature": 0.0}


@dataclass(frozen=True)
class Run:
    """Requests answered together. seconds: wall time from the first request to the last answer."""

    seconds: float
    replies: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> int:
        return sum(r["meta_info"]["completion_tokens"] for r in self.replies)

    @property
    def rounds(self) -> int:
        """Target passes that answered them, prefills left out; 0 without speculation."""
        return sum(r["meta_info"].get("spec_verify_ct") or 0 for r in self.replies)

    @property
    def verified_rows(self) -> int:
        """Rows of those passes, as our workers report them; 0 where they do not."""
        counts = (r["meta_info"].get("spec_cap_lens_histogram") or () for r in self.replies)
        return sum(rows * times for histogram in counts for rows, times in enumerate(histogram))


class Server:
    """`python -m sglang.launch_server` in a process group of its own."""

    def __init__(self, port: int, argv: Sequence[str], env: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(tempfile.mkstemp(suffix=".log", prefix="bench-")[1])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *argv],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/health", timeout=10, trust_env=False)
                if answer.status_code == 200:
                    return
            time.sleep(1)
        tail = self.log.read_text()[-3000:]
        raise SystemExit(f"server at {self.url}: expected to be ready, found:\n{tail}")

    def generate(self, ids: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {**GREEDY, "max_new_tokens": tokens, **sampling},
        }
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=900, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def run(
        self, prompts: Sequence[Sequence[int]], tokens: int, concurrency: int, **sampling: Any
    ) -> Run:
        """All prompts, `concurrency` at a time, greedily."""
        self.flush()
        started = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            replies = list(pool.map(lambda ids: self.generate(ids, tokens, **sampling), prompts))
        return Run(time.perf_counter() - started, tuple(replies))

    def flush(self) -> None:
        httpx.post(f"{self.url}/flush_cache", timeout=60, trust_env=False)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.unlink(missing_ok=True)


def close_all(servers: Iterable[Server]) -> None:
    for server in servers:
        server.close()
