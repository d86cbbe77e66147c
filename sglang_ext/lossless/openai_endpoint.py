"""Any OpenAI-compatible server, by `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import json
import re
from typing import Any

from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.errors import CannotTest, RefusedRequest
from sglang_ext.lossless.types import Answer, Key, Prompt, Sampling, Token

_STANDARD = {
    "max_tokens",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "logit_bias",
    "seed",
}


class OpenAIEndpoint(Endpoint):
    """Tokens are known by id where vLLM returns ids, else by their text."""

    def ask(self, prompt: Prompt, sampling: Sampling, tops: int = 0) -> Answer:
        return self._send(prompt, sampling, tops, 1)[0]

    def draw(self, prompt: Prompt, sampling: Sampling, count: int) -> list[Answer]:
        # Log-probabilities are asked for because tokens are told apart by them.
        return self._send(prompt, sampling, 0, count)

    def resolved(self, prompt: Prompt) -> Prompt:
        if self.facts.engine != "vllm" or prompt.text is None:
            return prompt
        found = self.post("/tokenize", {"model": self.facts.model, "prompt": prompt.text})
        return prompt.with_ids(found["tokens"])

    def _send(self, prompt: Prompt, sampling: Sampling, tops: int, count: int) -> list[Answer]:
        prompt = self.resolved(prompt)
        body: dict[str, Any] = {"model": self.facts.model} | self._how(sampling)
        if count > 1:
            body["n"] = count
        if self.facts.engine == "vllm":
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        if prompt.messages is not None:
            body["messages"] = [dict(m) for m in prompt.messages]
            body |= {"logprobs": True, "top_logprobs": tops}
            raw = self.post("/v1/chat/completions", body)
        else:
            body["prompt"] = prompt.text if prompt.ids is None else list(prompt.ids)
            body["logprobs"] = max(tops, 1)
            raw = self.post("/v1/completions", body)
        answers = [_answer(choice, raw, len(raw["choices"])) for choice in raw["choices"]]
        if len(answers) != count:
            raise CannotTest(
                "choices", expected=str(count), found=len(answers), remedy="The server ignores `n`."
            )
        self.note(answers)
        return answers

    def _how(self, sampling: Sampling) -> dict[str, Any]:
        given = sampling.given()
        body: dict[str, Any] = {}
        for name, value in given.items():
            if name in ("regex", "json_schema"):
                body |= self._grammar(name, value)
            elif name == "logit_bias":
                body[name] = {str(key): bias for key, bias in value}
            elif name in _STANDARD or self.facts.engine == "vllm":
                body[name] = list(value) if isinstance(value, tuple) else value
            elif name != "ignore_eos":
                # Sent although not in the standard: a server that knows no such field says so,
                # or is found out because it has no effect.
                body[name] = list(value) if isinstance(value, tuple) else value
        return body

    def _grammar(self, name: str, value: str) -> dict[str, Any]:
        """vLLM's fields for a regex or json_schema; it ignores names of another version.

        Raises RefusedRequest where the server is no vLLM.
        """
        if self.facts.engine != "vllm":
            raise RefusedRequest(501, f"{name}: no common name for it in this interface")
        kind, held = ("regex", value) if name == "regex" else ("json", json.loads(value))
        # Since 0.11; 0.12 knows no others.
        if re.match(r"0\.(10|\d)\.", self.facts.version):
            return {f"guided_{kind}": held}
        return {"structured_outputs": {kind: held}}


def _answer(choice: dict[str, Any], raw: dict[str, Any], choices: int) -> Answer:
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content") is not None:
        tokens = [_chat_token(entry) for entry in logprobs["content"]]
    elif logprobs.get("tokens") is not None:
        tokens = _completion_tokens(logprobs)
    else:
        raise CannotTest(
            "logprobs",
            expected="one entry per token",
            found="none",
            remedy="Start the server with log-probabilities on; tokens are compared by them.",
        )
    text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
    total = (raw.get("usage") or {}).get("completion_tokens")
    count = len(tokens) if choices > 1 or total is None else int(total)
    return Answer(tuple(tokens), text, str(choice["finish_reason"]), count)


def _chat_token(entry: dict[str, Any]) -> Token:
    top = tuple((_key(t["token"]), t["logprob"]) for t in entry.get("top_logprobs") or ())
    return Token(_key(entry["token"]), entry["logprob"], top)


def _key(token: str) -> Key:
    """The id, where the server writes tokens as `token_id:N` because it was asked to."""
    name, _, number = token.partition("token_id:")
    return int(number) if not name and number.isdigit() else token


def _completion_tokens(logprobs: dict[str, Any]) -> list[Token]:
    tokens = logprobs["tokens"]
    values = logprobs.get("token_logprobs") or [None] * len(tokens)
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        Token(_key(token), value, _ranked(row or {}))
        for token, value, row in zip(tokens, values, tops, strict=True)
    ]


def _ranked(row: dict[str, float]) -> tuple[tuple[Key, float], ...]:
    return tuple((_key(token), value) for token, value in sorted(row.items(), key=lambda i: -i[1]))
