"""A small OpenAI-compatible server with a law of its own, for tests of the checker.

It knows no token ids, no chat template and few parameters, as many servers do, or, as vLLM does,
ids, filters and grammars as well. Faults are arguments: what speculation might do wrong is done on
purpose.
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
# vLLM's ids: the words, then every other character.
_LETTERS = 100
# What a grammar allows, said whole.
_REGEX, _JSON = "ab-1-22-3 maybe", '{"id": 7, "ok": true, "kind": "beta"}'
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


def _text(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] if i < len(WORDS) else chr(i - _LETTERS) for i in ids)


class FakeServer:
    """Serves on a free local port while the context lasts.

    vllm: the version it says it is, "" for a server of no name
    grammars: whether it follows them
    """

    def __init__(
        self,
        change: Change = lambda said, logits: logits,
        *,
        stops: bool = True,
        vllm: str = "",
        grammars: bool = True,
    ) -> None:
        self.change, self.stops, self.vllm, self.grammars = change, stops, vllm, grammars
        self.random = random.Random(5)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                card = {"id": "fake", "max_model_len": 4096} | (
                    {"owned_by": "vllm"} if fake.vllm else {}
                )
                pages: dict[str, Any] = {"/v1/models": {"data": [card]}}
                if fake.vllm:
                    pages["/version"] = {"version": fake.vllm}
                found = pages.get(self.path)
                self._answer(*((404, {}) if found is None else (200, found)))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if fake.vllm and self.path == "/tokenize":
                    self._answer(200, {"tokens": [_LETTERS + ord(c) for c in body["prompt"]]})
                    return
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
        if self.vllm:
            body = {**body, "prompt": _text(body["prompt"])}
        choices = [self._choice(body) for _ in range(body.get("n", 1))]
        used = sum(len(c["logprobs"]["tokens"]) for c in choices)
        return {"choices": choices, "usage": {"completion_tokens": used}}

    def _held(self, body: dict[str, Any]) -> str | None:
        """The text that a grammar allows; a vLLM of the one kind does not see the other's names."""
        if not (self.vllm and self.grammars):
            return None
        old = self.vllm.startswith("0.10.")
        inner = body.get("structured_outputs") or {}
        asked = (
            {"regex": body.get("guided_regex"), "json": body.get("guided_json")} if old else inner
        )
        if asked.get("regex"):
            return _REGEX
        return _JSON if isinstance(asked.get("json"), dict) else None

    def _named(self, text: str) -> str:
        """A token as an answer writes it."""
        if not self.vllm:
            return text
        return f"token_id:{WORDS.index(text) if text in WORDS else _LETTERS + ord(text)}"

    def _logits(self, body: dict[str, Any], said: Sequence[str]) -> list[float]:
        values = self.change(said, _logits(body["prompt"], said))
        if self.vllm:
            for token, bias in (body.get("logit_bias") or {}).items():
                values[int(token)] += bias
        return values

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = self.random
        filtered = self.vllm and (
            body.get("top_k") == 1 or body.get("min_p") == 1.0 or body.get("top_p", 1.0) < 1e-3
        )
        if (held := self._held(body)) is not None:
            held = held[: body["max_tokens"]]
            names = [self._named(c) for c in held]
            finish = "length" if len(held) == body["max_tokens"] else "stop"
            # Its least, for what may not be said.
            rest = {self._named(word): -9999.0 for word in WORDS[:4]}
            tops = [{name: 0.0} | rest for name in names]
            logprobs = {"tokens": names, "token_logprobs": [0.0] * len(names), "top_logprobs": tops}
            return {"text": held, "finish_reason": finish, "logprobs": logprobs}
        if body.get("seed") is not None:
            rng = random.Random(f"{body['seed']}|{body['prompt']}")
        said: list[str] = []
        rows, finish = [], "length"
        while len(said) < body["max_tokens"]:
            values = _logprobs(self._logits(body, said))
            at = max(range(len(values)), key=values.__getitem__)
            if body["temperature"] > 0 and not filtered:
                weights = [math.exp(v / body["temperature"]) for v in values]
                at = rng.choices(range(len(values)), weights)[0]
            said.append(WORDS[at])
            names = [self._named(word) for word in WORDS]
            ranked = sorted(zip(names, values, strict=True), key=lambda pair: -pair[1])
            rows.append((values[at], dict(ranked[: body["logprobs"]])))
            if self.stops and any(s in "".join(said) for s in body.get("stop") or ()):
                finish = "stop"
                break
            if self.vllm and at in (body.get("stop_token_ids") or ()):
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
                "tokens": [self._named(word) for word in said],
                "token_logprobs": [value for value, _ in rows],
                "top_logprobs": [top for _, top in rows],
            },
        }
