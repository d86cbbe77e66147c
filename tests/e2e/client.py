"""The small part of SGLang's HTTP interface that the tests speak."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_ext.demo.events import events


@dataclass(frozen=True)
class Reply:
    """One finished request."""

    ids: list[int]
    text: str
    meta: dict[str, Any]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Reply:
        return cls(list(raw["output_ids"]), raw["text"], raw["meta_info"])

    @property
    def finish(self) -> Any:
        reason = self.meta["finish_reason"]
        return reason["type"] if isinstance(reason, dict) else reason

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verification."""
        return float(self.meta["spec_accept_length"])

    @property
    def accepted(self) -> list[int]:
        """Rounds that accepted 0, 1, 2, ... drafts; empty where the prefill ended the request."""
        return list(self.meta.get("spec_correct_drafts_histogram", ()))

    @property
    def logprobs(self) -> list[float]:
        return [entry[0] for entry in self.meta["output_token_logprobs"]]

    @property
    def logprob_ids(self) -> list[int]:
        return [entry[1] for entry in self.meta["output_token_logprobs"]]

    @property
    def top_logprobs(self) -> list[list[tuple[float, int]]]:
        rows = self.meta["output_top_logprobs"]
        return [[(entry[0], entry[1]) for entry in row] for row in rows]


class Refused(RuntimeError):
    """The server answered a request with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


Prompt = Sequence[int] | str


def greedy(max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy request."""
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, **more}


class Client:
    """Blocking client of one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self._http.post(path, **options)

    def _generate(self, body: dict[str, Any]) -> Any:
        response = self._http.post("/generate", json=body)
        if response.status_code != 200:
            raise Refused(response.status_code, response.text)
        return response.json()

    def generate(self, prompt: Prompt, params: dict[str, Any], **fields: Any) -> Reply:
        """One request; `fields` are further keys of the request (return_logprob, ...)."""
        return Reply.of(self._generate(_body(prompt, params, fields)))

    def batch(
        self,
        prompts: Sequence[Prompt],
        params: dict[str, Any] | Sequence[dict[str, Any]],
        **fields: Any,
    ) -> list[Reply]:
        """All prompts in one call: the server sees them at the same time."""
        each = [params] * len(prompts) if isinstance(params, dict) else list(params)
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {key: [p if isinstance(p, str) else list(p) for p in prompts]}
        return [Reply.of(raw) for raw in self._generate(body | {"sampling_params": each} | fields)]

    def together(
        self, bodies: Sequence[tuple[Prompt, dict[str, Any], dict[str, Any]]]
    ) -> list[Reply]:
        """Requests with fields of their own, sent at the same time from a thread each."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            futures = [pool.submit(self.generate, p, s, **f) for p, s, f in bodies]
            return [future.result() for future in futures]

    def stream(self, prompt: Prompt, params: dict[str, Any], **fields: Any) -> Iterator[Reply]:
        """Replies as they grow; closing the iterator early drops the connection."""
        body = _body(prompt, params, fields) | {"stream": True}
        with self._http.stream("POST", "/generate", json=body) as response:
            yield from map(Reply.of, events(response.iter_bytes()))

    def abort(self, rid: str) -> None:
        self._http.post("/abort_request", json={"rid": rid})

    def flush(self, seconds: float = 30) -> None:
        """Empty the prefix cache, as soon as nothing runs any more."""
        deadline = time.monotonic() + seconds
        while self._http.post("/flush_cache").status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests still run: {self.load()}")
            time.sleep(0.05)

    def load(self) -> dict[str, Any]:
        """Running and waiting requests, used tokens."""
        return dict(self._http.get("/v1/loads").json()["loads"][0])

    def settle(self, seconds: float = 30) -> int:
        """Wait until nothing runs, empty the prefix cache, and return the tokens still held."""
        self.flush(seconds)
        # The idle check of the scheduler, which raises on a lost slot, runs after that.
        time.sleep(0.3)
        return int(self.load()["num_used_tokens"])


def _body(prompt: Prompt, params: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    where = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return where | {"sampling_params": params} | fields
