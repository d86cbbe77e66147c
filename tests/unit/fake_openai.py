"""A small OpenAI-compatible server with a law of its own, for tests of the checker.

It knows no token ids, no chat template and few parameters, as many servers do. Faults are
arguments: what speculation might do wrong is done on purpose.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = tuple(f" w{n}" for n in range(12))
# (words so far, logits) -> logits
Change = Callable[[Sequence[str], list[float]], list[float]]


def _logits(text: str, said: Sequence[str]) -> list[float]:
    """A function of the prompt and the last two words."""
    rng = random.Random(f"{text[-20:]}|{'|'.join(said[-2:])}")
    return [rng.gauss(0.0, 2.0) for _ in WORDS]


def _logprobs(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(v - top) for v in logits)) + top
    return [v - total for v in logits]


class FakeServer:
    """Serves on a free local port while the context lasts."""

    def __init__(self, change: Change = lambda said, logits: logits, *, stops: bool = True) -> None:
        self.change, self.stops = change, stops
        self.random = random.Random(5)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                found = {"data": [{"id": "fake", "max_model_len": 4096}]}
                self._answer(*((200, found) if self.path == "/v1/models" else (404, {})))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/completions":
                    self._answer(400, {"error": {"message": "no chat template"}})
                    return
                self._answer(200, fake.complete(body))

            def _answer(self, status: int, found: dict[str, Any]) -> None:
                raw = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        class Server(ThreadingHTTPServer):
            # Of connections that wait: on a busy machine more than the default five do.
            request_queue_size = 128

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(body) for _ in range(body.get("n", 1))]
        used = sum(len(c["logprobs"]["tokens"]) for c in choices)
        return {"choices": choices, "usage": {"completion_tokens": used}}

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = self.random
        if body.get("seed") is not None:
            rng = random.Random(f"{body['seed']}|{body['prompt']}")
        said: list[str] = []
        rows, finish = [], "length"
        while len(said) < body["max_tokens"]:
            values = _logprobs(self.change(said, _logits(body["prompt"], said)))
            at = max(range(len(values)), key=values.__getitem__)
            if body["temperature"] > 0:
                weights = [math.exp(v / body["temperature"]) for v in values]
                at = rng.choices(range(len(values)), weights)[0]
            said.append(WORDS[at])
            ranked = sorted(zip(WORDS, values, strict=True), key=lambda pair: -pair[1])
            rows.append((values[at], dict(ranked[: body["logprobs"]])))
            if self.stops and any(s in "".join(said) for s in body.get("stop") or ()):
                finish = "stop"
                break
        text = "".join(said)
        for stop in body.get("stop") or ():
            if finish == "stop":
                text = text.split(stop)[0]
        return {
            "text": text,
            "finish_reason": finish,
            "logprobs": {
                "tokens": said,
                "token_logprobs": [value for value, _ in rows],
                "top_logprobs": [top for _, top in rows],
            },
        }
