"""Every sampling parameter acts on every accepted token as it does without speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.client import Client, Reply, greedy
from tests.e2e.stand import Stand
from tests.e2e.workload import identifier_prompt, ragged, random_prompt
from tests.tiny import EOS

pytestmark = pytest.mark.e2e

ALGORITHMS = ("DSPARK", "DFLASH")
PROMPTS = ragged(6, 900, longest=24)
GAMMA = 5
TOKENS = 40

Ask = Callable[[Client], list[Reply]]


def asks(params: dict[str, Any], **fields: Any) -> Ask:
    return lambda client: client.batch(PROMPTS, greedy(TOKENS, **params), **fields)


# Greedy requests whose answers must not depend on speculation.
DETERMINISTIC: dict[str, Ask] = {
    "frequency penalty": asks({"frequency_penalty": 0.7}),
    "presence penalty": asks({"presence_penalty": 0.9}),
    "repetition penalty": asks({"repetition_penalty": 1.3}),
    "all penalties": asks(
        {"frequency_penalty": 0.4, "presence_penalty": -0.3, "repetition_penalty": 1.15}
    ),
    "min new tokens": asks({"min_new_tokens": 25}),
    "min new tokens and stop ids": asks({"min_new_tokens": 20, "stop_token_ids": [*range(90)]}),
    "ignore EOS": asks({"ignore_eos": True}),
    "stop ids": asks({"stop_token_ids": [*range(40)]}),
    "logit bias": asks({"logit_bias": {str(i): -4.0 for i in range(0, 256, 3)}}),
    "top-k 1": asks({"temperature": 1.0, "top_k": 1}),
    "tiny top-p": asks({"temperature": 1.0, "top_p": 1e-6}),
    "min-p 1": asks({"temperature": 1.0, "min_p": 1.0}),
    "regex": asks({"regex": r"[a-f]{2,9}(-[0-9]{1,4}){3} (yes|no|maybe)+"}),
    "json schema": asks(
        {
            "json_schema": '{"type":"object","properties":{"id":{"type":"integer"},'
            '"ok":{"type":"boolean"}},"required":["id","ok"]}'
        }
    ),
    "ebnf": asks({"ebnf": 'root ::= "say " word (", " word)*\nword ::= [a-z] [a-z] [a-z]'}),
    "penalty under a grammar": asks({"regex": r"[ -~]*", "repetition_penalty": 1.4}),
}


@pytest.fixture(scope="module")
def expected(stand: Stand) -> dict[str, list[Reply]]:
    """What the server without speculation answers to each."""
    client = stand.plain()
    return {name: ask(client) for name, ask in DETERMINISTIC.items()}


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_to_plain(
    stand: Stand, expected: dict[str, list[Reply]], algorithm: str, name: str
) -> None:
    replies = DETERMINISTIC[name](stand.speculative(algorithm, gamma=GAMMA))
    for reply, plain in zip(replies, expected[name], strict=True):
        assert reply.ids == plain.ids
        assert reply.text == plain.text
        assert reply.meta["finish_reason"] == plain.meta["finish_reason"]
        assert reply.meta["completion_tokens"] == plain.meta["completion_tokens"]


def test_parameters_matter(expected: dict[str, list[Reply]]) -> None:
    """Each parameter changes some answer, or the comparison above would show nothing."""
    base = [r.ids for r in expected["top-k 1"]]
    unchanged = {"top-k 1", "tiny top-p", "min-p 1", "ignore EOS", "min new tokens"}
    for name, replies in expected.items():
        if name not in unchanged:
            assert [r.ids for r in replies] != base, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_banned_token_never_appears(stand: Stand, algorithm: str) -> None:
    client = stand.speculative(algorithm, gamma=GAMMA)
    free = client.batch(PROMPTS, greedy(TOKENS))
    for prompt, reply in zip(PROMPTS, free, strict=True):
        banned = max(set(reply.ids), key=reply.ids.count)
        bias = {"logit_bias": {str(banned): -100.0}}
        for temperature in (0.0, 1.0):
            params = greedy(TOKENS, **bias, ignore_eos=True) | {"temperature": temperature}
            assert banned not in client.generate(prompt, params).ids


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_length_is_exact(stand: Stand, algorithm: str) -> None:
    client = stand.speculative(algorithm, gamma=GAMMA)
    wanted = list(range(1, 17))
    replies = client.batch(
        [random_prompt(5, 40 + n) for n in wanted],
        [greedy(n, ignore_eos=True) for n in wanted],
    )
    assert [len(r.ids) for r in replies] == wanted
    assert [r.meta["completion_tokens"] for r in replies] == wanted
    assert {r.finish for r in replies} == {"length"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stop_inside_an_accepted_run(stand: Stand, algorithm: str) -> None:
    """Stop at each token of an answer in turn: ids, log-probabilities and usage end together."""
    client, plain = stand.speculative(algorithm, gamma=GAMMA), stand.plain()
    prompt = identifier_prompt(3)
    free = plain.generate(prompt, greedy(24))
    for at in range(1, 12):
        token = free.ids[at]
        params = greedy(at + 4, stop_token_ids=[token])
        for ask in (plain, client):
            reply = ask.generate(prompt, params, return_logprob=True)
            end = free.ids.index(token) + 1
            assert reply.ids == free.ids[:end]
            assert reply.finish == "stop"
            assert reply.meta["completion_tokens"] == end
            assert reply.logprob_ids == reply.ids


def test_reasoning_is_counted_up_to_the_stop(stand: Stand) -> None:
    """No request reports more reasoning than answer, wherever in a round it stops."""
    flags = ("--reasoning-parser", "deepseek-r1")
    target = stand.checkpoints.target("llama")
    plain = stand.server(stand.plain_spec(target, "--disable-overlap-schedule", *flags)).client
    client = stand.speculative("DSPARK", None, *flags, gamma=GAMMA)
    prompt = identifier_prompt(3)
    free = plain.generate(prompt, greedy(24))
    for at in range(1, 8):
        params = greedy(at + 4, stop_token_ids=[free.ids[at]])
        for ask in (plain, client):
            meta = ask.generate(prompt, params, require_reasoning=True).meta
            assert meta["reasoning_tokens"] == meta["completion_tokens"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stop_string_inside_an_accepted_run(stand: Stand, algorithm: str) -> None:
    client, plain = stand.speculative(algorithm, gamma=GAMMA), stand.plain()
    regex = {"regex": r"[a-z]{40}"}
    prompt = random_prompt(6, 77)
    free = plain.generate(prompt, greedy(40, **regex))
    for at in range(2, 16, 3):
        stop = free.text[at : at + 2]
        params = greedy(30, stop=[stop], **regex)
        expected = plain.generate(prompt, params, return_logprob=True)
        reply = client.generate(prompt, params, return_logprob=True)
        assert reply.finish == "stop"
        assert stop not in reply.text
        assert (reply.text, reply.ids) == (expected.text, expected.ids)
        assert reply.logprob_ids == reply.ids
        assert reply.meta["completion_tokens"] == len(reply.ids)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "params",
    [{}, {"repetition_penalty": 1.2}, {"logit_bias": {"10": 3.0}}],
    ids=["plain", "penalty", "bias"],
)
def test_log_probabilities(stand: Stand, algorithm: str, params: dict[str, Any]) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": 0}
    expected = asks(params, **fields)(stand.plain())
    replies = asks(params, **fields)(stand.speculative(algorithm, gamma=GAMMA))
    for reply, plain in zip(replies, expected, strict=True):
        assert reply.ids == plain.ids == reply.logprob_ids
        assert reply.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert len(reply.top_logprobs) == len(reply.ids)
        for mine, theirs in zip(reply.top_logprobs, plain.top_logprobs, strict=True):
            assert [v for v, _ in mine] == pytest.approx([v for v, _ in theirs], abs=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_greedy_rows_beside_sampled_ones(stand: Stand, algorithm: str) -> None:
    client = stand.speculative(algorithm, gamma=GAMMA)
    alone = [client.generate(p, greedy(TOKENS)) for p in PROMPTS[:3]]
    hot = {"temperature": 1.3, "max_new_tokens": TOKENS}
    mixed = client.batch(
        [p for prompt in PROMPTS[:3] for p in (prompt, prompt)],
        [q for _ in range(3) for q in (hot, greedy(TOKENS))],
    )
    assert [r.ids for r in mixed[1::2]] == [r.ids for r in alone]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_seed_repeats_the_text(stand: Stand, algorithm: str) -> None:
    """Whatever runs beside it, a seeded request says the same."""
    client = stand.speculative(algorithm, gamma=GAMMA)
    params = {
        "temperature": 1.0,
        "top_p": 0.95,
        "max_new_tokens": TOKENS,
        "sampling_seed": 1234,
        "ignore_eos": True,
    }
    prompt = PROMPTS[2]
    alone = client.generate(prompt, params)
    crowd = client.batch([*PROMPTS, prompt], [params | {"sampling_seed": 9}] * 6 + [params])
    assert crowd[-1].ids == alone.ids
    other = client.generate(prompt, params | {"sampling_seed": 4321})
    assert other.ids != alone.ids
    assert alone.acceptance_length > 1.0


def test_seeded_text_is_the_same_without_drafts(stand: Stand) -> None:
    """Whichever drafter runs, or none, a seed and its parameters give one text."""
    settings = [(1.0, 1.0, -1, 1), (0.7, 0.9, -1, 2), (1.2, 1.0, 20, 3), (0.9, 0.8, 50, 4)]
    params = [
        {"temperature": t, "top_p": p, "top_k": k, "max_new_tokens": TOKENS, "sampling_seed": s}
        for t, p, k, s in settings
    ]
    plain = [p | {"custom_params": {"speculative": False}} for p in params]
    texts = []
    for algorithm in ALGORITHMS:
        client = stand.speculative(algorithm, gamma=GAMMA)
        texts += [client.batch(PROMPTS[:4], asked) for asked in (params, plain)]
    assert all([r.ids for r in replies] == [r.ids for r in texts[0]] for replies in texts)
    assert sum(sum(r.accepted[1:]) for r in texts[0]) > 0
    assert sum(sum(r.accepted[1:]) for r in texts[1]) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_custom_logit_processor(stand: Stand, algorithm: str) -> None:
    from tests.e2e.processors import forbid

    fields = {"custom_logit_processor": forbid()}
    asked = [
        (PROMPTS[i], greedy(TOKENS, custom_params={"forbidden": [*range(i, 256, 2)]}), fields)
        for i in range(2)
    ]
    expected = stand.plain().together(asked)
    client = stand.speculative(algorithm, gamma=GAMMA)
    neighbour = client.generate(PROMPTS[3], greedy(TOKENS))
    replies = client.together([*asked, (PROMPTS[3], greedy(TOKENS), {})])
    assert [r.ids for r in replies[:2]] == [r.ids for r in expected]
    assert replies[2].ids == neighbour.ids
    for i, reply in enumerate(replies[:2]):
        assert not set(reply.ids) & set(range(i, 256, 2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_custom_logit_processor_has_the_last_word(stand: Stand, algorithm: str) -> None:
    """It runs after penalties and bias, on every token, the prefill's included."""
    from tests.e2e.processors import force

    params = greedy(
        8,
        # A name that this package reads elsewhere is the processor's here.
        custom_params={"token": 65, "gamma": 0.5},
        logit_bias={"65": -3e4},
        frequency_penalty=2.0,
        ignore_eos=True,
    )
    reply = stand.speculative(algorithm, gamma=GAMMA).generate(
        PROMPTS[0], params, custom_logit_processor=force()
    )
    assert reply.ids == [65] * 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_end_of_text_is_the_last_token(stand: Stand, algorithm: str) -> None:
    """The end token made likely: it ends the request wherever in a block it falls."""
    client, plain = stand.speculative(algorithm, gamma=GAMMA), stand.plain()
    params = greedy(60, logit_bias={str(EOS): 9.0})
    replies, expected = client.batch(PROMPTS, params), plain.batch(PROMPTS, params)
    assert [r.ids for r in replies] == [r.ids for r in expected]
    ended = [r for r in replies if r.finish == "stop"]
    assert ended
    assert all(EOS not in r.ids[:-1] for r in replies)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_options_of_a_request(stand: Stand, algorithm: str) -> None:
    """Drafting off or capped for one request; its neighbours keep theirs."""
    client = stand.speculative(algorithm, gamma=GAMMA)
    free = client.batch(PROMPTS, greedy(TOKENS, ignore_eos=True))
    options = [
        {"speculative": False},
        {"gamma": 0},
        {"gamma": 1},
        {"gamma": 3},
        None,
        {"gamma": 99},
    ]
    params = [
        greedy(TOKENS, ignore_eos=True, **({} if o is None else {"custom_params": o}))
        for o in options
    ]
    replies = client.batch(PROMPTS, params)
    assert [r.ids for r in replies] == [r.ids for r in free]
    most = [max(n for n, rounds in enumerate(r.accepted) if rounds) for r in replies]
    assert most[:2] == [0, 0]
    assert most[2] <= 1
    assert most[3] <= 3
    for i in (4, 5):
        assert replies[i].accepted == free[i].accepted
