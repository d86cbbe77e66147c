"""A server to ask: the contract, what kind of server answers at a URL, many requests at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import httpx

from sglang_ext.lossless.errors import CannotTest, RefusedRequest
from sglang_ext.lossless.types import Answer, Drafts, Facts, Prompt, Sampling, Token

Tick = Callable[[], None]
# Statuses with which servers say that a request, rather than the server, is at fault.
_REFUSALS = (400, 404, 405, 413, 422, 501)


class Endpoint(ABC):
    """One server; `facts` says what it is, `drafts` adds up what it said about its drafts."""

    def __init__(self, http: httpx.Client, facts: Facts) -> None:
        self.http, self.facts = http, facts
        self.drafts: Drafts | None = None
        self._tally = Lock()

    @abstractmethod
    def ask(self, prompt: Prompt, sampling: Sampling, tops: int = 0) -> Answer:
        """One request. tops: how many most likely tokens to report at each position.

        Raises RefusedRequest, CannotTest.
        """

    @abstractmethod
    def draw(self, prompt: Prompt, sampling: Sampling, count: int) -> list[Answer]:
        """The same request `count` times, at once."""

    def continued(self, prompt: Prompt, prefix: Sequence[Any]) -> Prompt | None:
        """`prompt` with tokens of an answer appended; None where the server names no ids."""
        if prompt.ids is None or not all(isinstance(key, int) for key in prefix):
            return None
        return prompt.with_ids([*prompt.ids, *prefix])

    def scores(self, prompt: Prompt, keys: Sequence[Any], tops: int) -> list[Token] | None:
        """How the server rates each of `keys` after what precedes it; None where it cannot say."""
        return None

    def resolved(self, prompt: Prompt) -> Prompt:
        """`prompt` as token ids where the server can tell them, else as it is."""
        return prompt

    def ask_all(
        self,
        asked: Iterable[tuple[Prompt, Sampling]],
        concurrency: int,
        *,
        tops: int = 0,
        tick: Tick = lambda: None,
    ) -> list[Answer]:
        """Answers in the order asked, `concurrency` requests under way at a time."""

        def one(pair: tuple[Prompt, Sampling]) -> Answer:
            answer = self.ask(*pair, tops=tops)
            tick()
            return answer

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, list(asked)))

    def note(self, answers: Sequence[Answer]) -> None:
        """Add to the tally of drafts."""
        with self._tally:
            for answer in answers:
                if answer.drafts is not None:
                    self.drafts = (self.drafts or Drafts()) + answer.drafts

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON of an answer."""
        url = self.facts.url
        try:
            response = self.http.post(path, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        if response.status_code in _REFUSALS:
            raise RefusedRequest(response.status_code, _message(response))
        if response.status_code != 200:
            raise CannotTest(
                f"{url}{path}",
                expected="HTTP 200",
                found=f"HTTP {response.status_code}: {_message(response)}",
                remedy="Look into the server's log.",
            )
        return response.json()


APIS = ("auto", "openai")


def connect(
    url: str, *, seconds: float = 600, key: str | None = None, api: str = "auto"
) -> Endpoint:
    """The endpoint at `url`.

    api: "auto" finds out by asking; "openai" uses nothing but `/v1`, as through a gateway

    Raises:
        CannotTest: nobody answers, no access, no such API.
    """
    from sglang_ext.lossless.openai_endpoint import OpenAIEndpoint
    from sglang_ext.lossless.sglang_endpoint import SGLangEndpoint

    address = _base(url)
    if key and not (key.isascii() and key.isprintable()):
        raise CannotTest("--key", expected="ASCII", found=repr(key), remedy="Check the key.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=256)
    try:
        http = httpx.Client(
            base_url=address, timeout=seconds, headers=headers, limits=limits, trust_env=False
        )
        listing = http.get("/v1/models")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise _no_url(url) from error
    except httpx.HTTPError as error:
        raise _unreachable(address, error) from error
    if listing.status_code in (401, 403):
        raise CannotTest(
            address, expected="access", found=f"HTTP {listing.status_code}", remedy="Pass --key."
        )
    info = _json_of(http, "/server_info") if api == "auto" else None
    if info is not None and "model_path" in info:
        return SGLangEndpoint(http, _sglang_facts(address, info, http))
    models = _models(address, listing)
    version = _json_of(http, "/version") if api == "auto" else None
    facts = Facts(address, "openai", str(models[0]["id"]), context=models[0].get("max_model_len"))
    if version is not None and models[0].get("owned_by") == "vllm":
        facts = replace(facts, engine="vllm", version=str(version.get("version", "unknown")))
    return OpenAIEndpoint(http, facts)


def _base(url: str) -> str:
    """Scheme and host of a URL, with or without the /v1 that OpenAI clients carry."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise _no_url(url)
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _no_url(url: str) -> CannotTest:
    return CannotTest(
        "URL", expected="http://HOST:PORT", found=repr(url), remedy="Give the server's address."
    )


def _json_of(http: httpx.Client, path: str) -> dict[str, Any] | None:
    with suppress(httpx.HTTPError, ValueError):
        response = http.get(path)
        if response.status_code == 200:
            found = response.json()
            return found if isinstance(found, dict) else None
    return None


def _models(address: str, listing: httpx.Response) -> list[dict[str, Any]]:
    found: Any = None
    with suppress(ValueError):
        found = listing.json()
    models = found.get("data") if isinstance(found, dict) else None
    if listing.status_code != 200 or not models:
        raise CannotTest(
            f"{address}/v1/models",
            expected="a list of models (an OpenAI-compatible server)",
            found=f"HTTP {listing.status_code}",
            remedy="Check the address; give it without a path, or with /v1.",
        )
    return list(models)


def _sglang_facts(address: str, info: dict[str, Any], http: httpx.Client) -> Facts:
    models = _json_of(http, "/v1/models") or {}
    card = (models.get("data") or [{}])[0]
    dtype = str(info.get("dtype") or "unknown")
    return Facts(
        address,
        "sglang",
        str(info["model_path"]),
        version=str(info.get("version", "unknown")),
        dtype="unknown" if dtype in ("auto", "half") else dtype,
        algorithm=info.get("speculative_algorithm") or "",
        context=card.get("max_model_len"),
    )


def _message(response: httpx.Response) -> str:
    with suppress(ValueError):
        found = response.json()
        inner = found.get("error", found) if isinstance(found, dict) else found
        if isinstance(inner, dict) and "message" in inner:
            return str(inner["message"])[:400]
    return response.text[:400]


def _unreachable(url: str, error: httpx.HTTPError) -> CannotTest:
    return CannotTest(
        url,
        expected="an answer",
        found=f"{type(error).__name__}: {error}",
        remedy="Start the server, or check the address.",
    )
