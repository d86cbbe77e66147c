"""Ranks that serve the same requests draft, verify and commit the same; DP ranks need not.

One rank's answers are the oracle, in fp32. Elsewhere servers of several ranks verify every draft
of every round, so that what they do does not depend on time; here they run with the defaults too.
"""

from __future__ import annotations

import re

import httpx
import pytest

from sglang_ext.core.support import layout
from tests.e2e.client import Client, Reply, greedy
from tests.e2e.faults import VARIABLE
from tests.e2e.layout_runs import CHUNK, RUNS, Answers
from tests.e2e.rank_faults import (
    APART,
    COUNTS,
    DRAFTS,
    FIRST_TOKEN,
    GATE,
    LENGTHS,
    STUBBORN,
    TOKENS,
)
from tests.e2e.servers import Server
from tests.e2e.stand import Stand
from tests.e2e.workload import lengths, ragged

pytestmark = pytest.mark.e2e

KIND, GAMMA = "qwen3_moe", 4
DEFAULTS = {"SGLANG_EXT_SCHEDULER": "", "SGLANG_EXT_DRAFT_PAYS": "", "SGLANG_EXT_PROBE_EVERY": "1"}
PROMPTS = ragged(10, 300)
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
ROUNDS = re.compile(r'^sglang_ext_spec_rounds_total\{.*kind="(\w+)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def alone(stand: Stand) -> Client:
    """One rank with DSPARK."""
    return stand.speculative("DSPARK", kind=KIND)


@pytest.fixture(scope="module")
def one_rank(stand: Stand) -> dict[str, Answers]:
    """Workload -> what one rank says without speculation."""
    target = stand.checkpoints.target(KIND)
    client = stand.server(stand.plain_spec(target, "--chunked-prefill-size", CHUNK)).client
    return {name: RUNS[name](client, 1) for name in ("ragged", "one idle rank")}


def _server(stand: Stand, name: str, *flags: object, env: dict[str, str]) -> Server:
    where = layout(name)
    draft = stand.checkpoints.draft("DSPARK", "vanilla", KIND)
    flags = (*where.flags, "--chunked-prefill-size", CHUNK * where.attention_dp, *flags)
    spec = stand.spec("DSPARK", draft, stand.checkpoints.target(KIND), GAMMA, *flags, env=env)
    return stand.server(spec)


def _rounds(client: Client) -> dict[str, float]:
    """Requests served by drafted and by plain rounds so far."""
    found: dict[str, float] = {}
    for kind, value in ROUNDS.findall(client.get("/metrics").text):
        found[kind] = found.get(kind, 0) + float(value)
    return found


def test_dp_ranks_pause_and_schedule_by_themselves(
    stand: Stand, one_rank: dict[str, Answers]
) -> None:
    """With the defaults each DP rank drafts, or does not, and admits drafts as it sees fit."""
    server = _server(stand, "dp2 attention", "--enable-metrics", env=DEFAULTS)
    for name, expected in one_rank.items():
        assert RUNS[name](server.client, 2) == expected, name
    assert all(_rounds(server.client)[kind] > 0 for kind in ("drafted", "plain"))
    for drafting in range(2):
        bodies = [
            (prompt, params | _drafts(i % 2 == drafting), {"routed_dp_rank": i % 2})
            for i, (prompt, params) in enumerate(zip(PROMPTS, lengths(10, 22), strict=True))
        ]
        replies = server.client.together(bodies)
        assert [reply.ids for reply in replies] == one_rank["ragged"], drafting
    assert server.client.settle() == 0
    server.assert_healthy()


def _drafts(wanted: bool) -> dict[str, object]:
    return {"custom_params": {"speculative": wanted}}


def _stubborn(stand: Stand) -> Server:
    return _server(stand, "tp2", env={VARIABLE: STUBBORN})


def test_first_rank_decides(stand: Stand, one_rank: dict[str, Answers]) -> None:
    """A second rank that would always do otherwise changes no answer."""
    server = _stubborn(stand)
    assert RUNS["ragged"](server.client, 1) == one_rank["ragged"]
    _assert_accepted(server.client.batch(PROMPTS, greedy(16)))
    server.assert_healthy()


def test_a_seed_says_the_same_on_two_ranks(stand: Stand, alone: Client) -> None:
    params = [SAMPLED | {"sampling_seed": 100 + i} for i in range(len(PROMPTS))]
    expected = [reply.ids for reply in alone.batch(PROMPTS, params)]
    replies = _stubborn(stand).client.batch(PROMPTS, params)
    assert [reply.ids for reply in replies] == expected
    _assert_accepted(replies)


def test_ranks_stay_in_step_without_a_seed(stand: Stand, alone: Client) -> None:
    """Both ranks hold the text that was sent: it goes on as it does on one rank."""
    server = _stubborn(stand)
    replies = server.client.batch(PROMPTS, SAMPLED)
    assert [len(reply.ids) for reply in replies] == [SAMPLED["max_new_tokens"]] * len(PROMPTS)
    _assert_accepted(replies)
    longer = [p + reply.ids for p, reply in zip(PROMPTS, replies, strict=True)]
    expected = [reply.ids for reply in alone.batch(longer, greedy(6))]
    assert [reply.ids for reply in server.client.batch(longer, greedy(6))] == expected
    assert server.client.settle() == 0
    server.assert_healthy()


def _assert_accepted(replies: list[Reply]) -> None:
    assert max(reply.acceptance_length for reply in replies) > 1, "no draft was accepted"


# The last two end the server: ranks with other row counts wait for different things.
@pytest.mark.parametrize("apart", [FIRST_TOKEN, DRAFTS, COUNTS, TOKENS, LENGTHS, GATE])
def test_an_agreement_left_out_is_seen(
    stand: Stand, one_rank: dict[str, Answers], apart: str
) -> None:
    """The comparisons above can fail: each of the agreements is needed."""
    server = _stubborn(stand)
    server.client.flush()
    ends = apart in (LENGTHS, GATE)
    params = lengths(len(PROMPTS), 22, custom_params={APART: apart})
    body = {"input_ids": PROMPTS, "sampling_params": params}
    try:
        response = server.client.post("/generate", json=body, timeout=10 if ends else 60)
    except httpx.TransportError:
        assert ends
    else:
        assert [answer["output_ids"] for answer in response.json()] != one_rank["ragged"]
    if ends:
        stand.pool.drop(server.spec)
