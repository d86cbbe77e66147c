"""SGLang by its native `/generate`: token ids, every parameter, and what it says of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from sglang_ext.lossless.endpoint import Endpoint
from sglang_ext.lossless.errors import CannotTest, RefusedRequest
from sglang_ext.lossless.types import Answer, Drafts, Facts, Prompt, Sampling, Token

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class SGLangEndpoint(Endpoint):
    """speculative: False asks each request to be served without drafts (sglang-ext's workers)."""

    def __init__(self, http: httpx.Client, facts: Facts, speculative: bool = True) -> None:
        super().__init__(http, facts)
        self.speculative = speculative

    def without_drafts(self) -> SGLangEndpoint:
        """The same server, asked not to draft."""
        return SGLangEndpoint(self.http, self.facts, speculative=False)

    def ask(self, prompt: Prompt, sampling: Sampling, tops: int = 0) -> Answer:
        raw = self.post("/generate", self._where([prompt]) | self._how(sampling, tops))
        answers = [_answer(one) for one in (raw if isinstance(raw, list) else [raw])]
        self.note(answers)
        return answers[0]

    def draw(self, prompt: Prompt, sampling: Sampling, count: int) -> list[Answer]:
        body = self._where([prompt] * count) | self._how(sampling, 0)
        answers = [_answer(one) for one in self.post("/generate", body)]
        self.note(answers)
        return answers

    def resolved(self, prompt: Prompt) -> Prompt:
        if prompt.ids is not None:
            return prompt
        body: dict[str, Any] = {"model": self.facts.model}
        if prompt.messages is None:
            body |= {"prompt": prompt.text}
        else:
            body |= {"messages": [dict(m) for m in prompt.messages]}
        try:
            return prompt.with_ids(self.post("/tokenize", body)["tokens"])
        except CannotTest as error:
            # A model without a chat template answers with a server error.
            if prompt.messages is None:
                raise
            raise RefusedRequest(400, str(error)) from error

    def scores(self, prompt: Prompt, keys: Sequence[Any], tops: int) -> list[Token] | None:
        """How the server rates each of `keys` after what precedes it, in one prefill."""
        assert prompt.ids is not None
        body = {
            "input_ids": [*prompt.ids, *keys],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": len(prompt.ids) - 1,
            "top_logprobs_num": tops,
        }
        meta = self.post("/generate", body)["meta_info"]
        rows = _tokens(meta["input_token_logprobs"], meta.get("input_top_logprobs"))
        return list(rows[-len(keys) :])

    def _where(self, prompts: list[Prompt]) -> dict[str, Any]:
        ids = [list(self.resolved(p).ids or ()) for p in prompts[:1]] * len(prompts)
        return {"input_ids": ids}

    def _how(self, sampling: Sampling, tops: int) -> dict[str, Any]:
        params = {_NAMES.get(name, name): value for name, value in sampling.given().items()}
        if "logit_bias" in params:
            params["logit_bias"] = {str(key): value for key, value in params["logit_bias"]}
        if not self.speculative:
            params["custom_params"] = {"speculative": False}
        body: dict[str, Any] = {"sampling_params": params}
        if tops:
            body |= {"return_logprob": True, "top_logprobs_num": tops}
        return body


def _answer(raw: dict[str, Any]) -> Answer:
    meta = raw["meta_info"]
    if "output_token_logprobs" in meta:
        tokens = _tokens(meta["output_token_logprobs"], meta.get("output_top_logprobs"))
    else:
        tokens = tuple(Token(key) for key in raw["output_ids"])
    reason = meta["finish_reason"]
    kind = reason["type"] if isinstance(reason, dict) else str(reason)
    if kind == "abort":
        message = reason.get("message", "") if isinstance(reason, dict) else ""
        raise RefusedRequest(400, f"aborted: {message}")
    if [t.key for t in tokens] != list(raw["output_ids"]):
        raise CannotTest(
            "output_token_logprobs",
            expected="the tokens of output_ids",
            found="others",
            remedy="The server's log-probabilities do not belong to its text; report it.",
        )
    return Answer(tokens, raw["text"], kind, meta["completion_tokens"], _drafts(meta))


def _tokens(chosen: list[Any], tops: list[Any] | None) -> tuple[Token, ...]:
    rows = tops or [None] * len(chosen)
    return tuple(
        Token(key, value, tuple((k, v) for v, k, *_ in row or ()))
        for (value, key, *_), row in zip(chosen, rows, strict=True)
    )


def _drafts(meta: dict[str, Any]) -> Drafts | None:
    if meta.get("spec_verify_ct") is None:
        return None
    histogram = meta.get("spec_correct_drafts_histogram")
    rounds = int(meta["spec_verify_ct"])
    if histogram:
        return Drafts(rounds, sum(n * times for n, times in enumerate(histogram)))
    return Drafts(rounds, max(int(meta["completion_tokens"]) - 1 - rounds, 0))
