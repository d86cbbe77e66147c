"""`sglang-ext demo run`: serve the built-in model with DSPARK, answer a prompt, show the gain."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from sglang_ext import child
from sglang_ext.demo.events import events

PROMPTS = (
    "Tom has 3 boxes with 12 apples in each box. He gives 7 apples to his sister and sells half of "
    "the rest. How many apples does he have left? Please reason step by step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
)
_START_SECONDS = 600
_NEW_TOKENS = 160


@dataclass(frozen=True)
class Answer:
    """What one request returned and how long its tokens took, the prefill left out."""

    text: str
    tokens: int
    seconds: float
    acceptance_length: float | None

    @property
    def tokens_per_second(self) -> float:
        return max(self.tokens - 1, 0) / max(self.seconds, 1e-9)


class DemoError(RuntimeError):
    """The server did not come up or did not answer."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(argv: list[str], port: int, console: Console) -> Iterator[str]:
    """A running server; its URL. Ended with everything it started when the block is left."""
    log = Path(tempfile.mkstemp(prefix="sglang-ext-demo-", suffix=".log")[1])
    process = child.start([*child.SERVER, "--port", str(port), *argv], log)
    try:
        with console.status(f"starting the server (log: {log})"):
            _wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.end(process, patience=15.0)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            code, tail = process.returncode, child.last_lines(log)
            raise DemoError(f"the server ended with code {code}:\n{tail}")
        try:
            answer = httpx.get(f"{url}/health_generate", timeout=20, trust_env=False)
            if answer.status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise DemoError(f"the server was not ready after {_START_SECONDS} s; see {log}")


def ask(url: str, prompt: str, *, drafting: bool, show: Console | None = None) -> Answer:
    """Stream one greedy answer; `drafting` False asks for it without speculation."""
    body = {
        "text": prompt,
        "stream": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": _NEW_TOKENS,
            "custom_params": {"speculative": drafting},
        },
    }
    text, meta, first, last = "", {}, 0.0, 0.0
    at = f"{url}/generate"
    with httpx.stream("POST", at, json=body, timeout=300, trust_env=False) as response:
        response.raise_for_status()
        for event in events(response.iter_bytes()):
            last = time.perf_counter()
            first = first or last
            if show is not None:
                show.out(event["text"][len(text) :], end="", highlight=False)
            text, meta = event["text"], event["meta_info"]
    return Answer(text, meta["completion_tokens"], last - first, meta.get("spec_accept_length"))


def chat_prompt(target: str, question: str) -> str:
    """The question in the model's own chat format."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def compare(url: str, prompts: list[str]) -> dict[str, float]:
    """Tokens per second with and without drafting, on the same prompts, in turns."""
    drafted = [ask(url, p, drafting=True) for p in prompts]
    plain = [ask(url, p, drafting=False) for p in prompts]
    lengths = [a.acceptance_length or 1.0 for a in drafted]
    return {
        "tokens_per_second": _rate(drafted),
        "tokens_per_second_without": _rate(plain),
        "speedup": _rate(drafted) / _rate(plain),
        "acceptance_length": sum(lengths) / len(lengths),
        "same_text": float(sum(a.text == b.text for a, b in zip(drafted, plain, strict=True))),
    }


def _rate(answers: list[Answer]) -> float:
    return sum(a.tokens - 1 for a in answers) / sum(a.seconds for a in answers)


def _table(figures: dict[str, float], prompts: int) -> Table:
    table = Table(title="Greedy, one request at a time, in this server")
    for column in ("", "tokens/s", "acceptance length"):
        table.add_column(column)
    table.add_row(
        "DSPARK",
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['acceptance_length']:.2f}",
    )
    table.add_row("drafting off", f"{figures['tokens_per_second_without']:.1f}", "1.00")
    table.add_row("ratio", f"{figures['speedup']:.2f}", "")
    table.caption = (
        "drafting off still feeds the draft's cache, so a server without DSPARK is a little faster "
        f"than that row; same text for {figures['same_text']:.0f} of {prompts} prompts (in bf16 a "
        "near-tie may round either way, in fp32 the text is always the same)"
    )
    return table


def _next_steps(url: str) -> str:
    return f"""
The server is up at {url}. Next:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "default", "messages": [{{"role": "user", "content": "What is a prime?"}}]}}'

  python -c "from openai import OpenAI; c = OpenAI(base_url='{url}/v1', api_key='none'); \\
    print(c.chat.completions.create(model='default', messages=[{{'role': 'user', \\
    'content': 'What is a prime?'}}]).choices[0].message.content)"

Ctrl-C ends it."""


def run(paths: dict[str, str], *, once: bool, port: int | None, extra: list[str]) -> None:
    """Serve, answer, compare; then wait for Ctrl-C unless `once`."""
    console = Console()
    argv = [
        "--model-path",
        paths["target"],
        "--speculative-algorithm",
        "DSPARK",
        "--speculative-draft-model-path",
        paths["dspark"],
        *extra,
    ]
    console.print(f"python -m sglang.launch_server {' '.join(argv)}", highlight=False)
    with server(argv, port or free_port(), console) as url:
        prompts = [chat_prompt(paths["target"], question) for question in PROMPTS]
        console.rule(PROMPTS[0])
        ask(url, prompts[0], drafting=True, show=console)
        console.print()
        with console.status("comparing with drafting off"):
            figures = compare(url, prompts)
        console.print(_table(figures, len(prompts)))
        console.print_json(data=figures)
        if once:
            return
        console.print(_next_steps(url), markup=False, highlight=False)
        try:
            signal.pause()
        except KeyboardInterrupt:
            console.print("ending the server")
