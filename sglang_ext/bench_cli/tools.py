"""SGLang's benchmark tools, run as a user runs them, and the figures taken from their output."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from sglang_ext.bench_cli.conversations import conversations_in
from sglang_ext.bench_cli.grid import Dataset, Point
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.prompts import as_text, builtin

TOOLS = ("serving", "one-batch")
# Our name -> theirs.
_SERVING = {
    "output_tokens_per_second": "output_throughput",
    "median_tpot_ms": "median_tpot_ms",
    "p99_tpot_ms": "p99_tpot_ms",
    "median_ttft_ms": "median_ttft_ms",
    "median_itl_ms": "median_itl_ms",
    "acceptance_length": "accept_length",
    "completed": "completed",
    "seconds": "duration",
}
_ONE_BATCH = {
    "output_tokens_per_second": "output_throughput",
    "acceptance_length": "acc_length",
    "seconds": "latency",
}


@dataclass(frozen=True)
class Load:
    """Shape of the requests. temperature: of every request; prompts: per point, serving only.

    chat: texts are put into the model's chat format
    """

    tool: str = "serving"
    input_tokens: int = 256
    output_tokens: int = 128
    prompts: int = 32
    temperature: float = 0.0
    chat: bool = False
    seed: int = 1
    seconds: float = 3600


def measure(url: str, point: Point, load: Load) -> dict[str, Any]:
    """Figures of one point. Raises CannotTest where the tool fails or a request does."""
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as folder:
        out = Path(folder, "result.jsonl")
        serving = load.tool == "serving"
        data = _file_of(point.dataset, load, Path(folder))
        count = load.prompts if data is None else min(load.prompts, conversations_in(data))
        command = (
            _serving(url, point, replace(load, prompts=count), data, out)
            if serving
            else _one_batch(url, point, load, out)
        )
        counted = point.setting.algorithm != "none" and _forget_acceptance(url)
        raw = _run(command, out, load.seconds)
    fields = _SERVING if serving else _ONE_BATCH
    figures = {ours: raw.get(theirs) for ours, theirs in fields.items()}
    if not counted:
        figures["acceptance_length"] = None
    figures["input_tokens"] = load.input_tokens
    if serving and figures["completed"]:
        figures["input_tokens"] = round(raw["total_input_tokens"] / figures["completed"])
    if serving and figures["completed"] != count:
        raise CannotTest(
            point.key,
            expected=f"{count} requests answered",
            found=figures["completed"],
            remedy="Look into the server's log; a point with failures is not kept.",
        )
    if not serving and figures["output_tokens_per_second"]:
        # Seconds per token of one request: what TPOT is where all requests run in step.
        rate = float(figures["output_tokens_per_second"])
        figures["median_tpot_ms"] = 1e3 * point.concurrency / rate
    return figures


def _forget_acceptance(url: str) -> bool:
    """Start the server's average over all it has served anew; False where it cannot.

    Both tools report that average. SGLang drops it when the threshold is set, here to what it is.
    """
    body = {"server_args": {"speculative_accept_threshold_acc": 1.0}}
    with suppress(httpx.HTTPError):
        answer = httpx.post(f"{url}/set_internal_state", json=body, timeout=60, trust_env=False)
        return answer.status_code == 200
    return False


def _file_of(dataset: Dataset, load: Load, folder: Path) -> Path | None:
    """The requests as a file: the user's, or a built-in set written out; None for random ids."""
    if dataset.path is not None:
        return Path(dataset.path)
    if dataset.is_random:
        return None
    prompts = [as_text(p).text if p.messages else p.text for p in builtin((dataset.name,))]
    lines = (
        # The tool wants an answer beside each question and reads nothing of it.
        json.dumps({"conversations": [{"content": text}, {"content": "An answer."}]})
        for text in islice(cycle(prompts), load.prompts)
    )
    path = folder / f"{dataset.name}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _serving(url: str, point: Point, load: Load, data: Path | None, out: Path) -> list[str]:
    command = [
        *("-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url),
        *("--num-prompts", load.prompts, "--max-concurrency", point.concurrency),
        *("--seed", load.seed, "--temperature", load.temperature, "--warmup-requests", 1),
        *("--output-file", out, "--disable-tqdm", "--flush-cache"),
    ]
    if data is None:
        command += ["--dataset-name", "random-ids", "--random-range-ratio", 1]
        command += ["--random-input-len", load.input_tokens]
        command += ["--random-output-len", load.output_tokens]
    else:
        kind = "sharegpt" if data.suffix == ".json" else "custom"
        command += ["--dataset-name", kind, "--dataset-path", data]
        command += ["--sharegpt-output-len", load.output_tokens]
        command += ["--apply-chat-template"] if load.chat else []
    return [str(part) for part in command]


def _one_batch(url: str, point: Point, load: Load, out: Path) -> list[str]:
    command = [
        *("-m", "sglang.bench_one_batch_server", "--model", "None", "--base-url", url),
        *("--batch-size", point.concurrency, "--input-len", load.input_tokens),
        *("--output-len", load.output_tokens, "--temperature", load.temperature),
        *("--dataset-name", "random-ids", "--result-filename", out, "--seed", load.seed),
        "--no-append-to-github-summary",
    ]
    return [str(part) for part in command]


def _run(command: list[str], out: Path, seconds: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=out.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotTest(
            command[1], expected=f"an end within {seconds:g} s", found="none", remedy="Ask less."
        ) from error
    if done.returncode or not out.is_file():
        tail = "\n".join(done.stdout.splitlines()[-12:])
        raise CannotTest(
            command[1],
            expected="a result",
            found=f"exit code {done.returncode}",
            remedy=f"Its output ends with:\n{tail}",
        )
    return json.loads(out.read_text().splitlines()[-1])
