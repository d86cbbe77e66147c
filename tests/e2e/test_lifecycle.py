"""Requests that share, leave, retract or run into a limit: same answers, no slot lost."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler

import httpx
import pytest

from tests.e2e.client import Client, Refused, Reply, greedy
from tests.e2e.servers import Server
from tests.e2e.stand import Stand
from tests.e2e.workload import accepted, ids_of, ragged, random_prompt, run_batches

pytestmark = pytest.mark.e2e

ALGORITHMS = ("DSPARK", "DFLASH")
SOAK = int(os.environ.get("SGLANG_EXT_TEST_SOAK", "2000"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_prefix_hit_drafts_as_well(stand: Stand, algorithm: str) -> None:
    """Acceptance is the same cold and warm, also after others used the slots in between."""
    client = stand.speculative(algorithm)
    shared = random_prompt(41, 1)
    for n, suffix in enumerate(([], random_prompt(3, 2), random_prompt(11, 3))):
        prompt = shared + suffix
        client.flush()
        cold = client.generate(prompt, greedy(40, ignore_eos=True))
        client.flush()
        client.batch(ragged(6, 50 + n), greedy(20))
        client.generate(shared + random_prompt(9, 60 + n), greedy(20))
        warm = client.generate(prompt, greedy(40, ignore_eos=True))
        assert cold.meta["cached_tokens"] == 0
        assert warm.meta["cached_tokens"] >= len(shared) - 1
        assert warm.ids == cold.ids
        assert warm.accepted == cold.accepted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sliding_draft_and_prefix_hits(stand: Stand, algorithm: str) -> None:
    """A draft with a window shorter than the prompt keeps its acceptance through the cache."""
    client = stand.speculative(algorithm, "sliding")
    shared = random_prompt(50, 8)
    prompts = [shared + random_prompt(2 + n, 80 + n) for n in range(4)]
    cold = []
    for prompt in prompts:
        client.flush()
        cold.append(client.generate(prompt, greedy(30, ignore_eos=True)))
    warm = client.batch(prompts, greedy(30, ignore_eos=True))
    assert all(reply.meta["cached_tokens"] >= len(shared) - 1 for reply in warm)
    assert [r.ids for r in warm] == [r.ids for r in cold]
    assert [r.accepted for r in warm] == [r.accepted for r in cold]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chunks_do_not_change_acceptance(stand: Stand, algorithm: str) -> None:
    whole = stand.speculative(algorithm)
    whole.flush()
    expected = whole.batch(ragged(5, 300), greedy(30))
    chunked = stand.speculative(algorithm, None, "--chunked-prefill-size", 8)
    chunked.flush()
    replies = chunked.batch(ragged(5, 300), greedy(30))
    assert [r.ids for r in replies] == [r.ids for r in expected]
    assert [r.accepted for r in replies] == [r.accepted for r in expected]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_streamed_is_whole(stand: Stand, algorithm: str) -> None:
    client = stand.speculative(algorithm)
    prompt = random_prompt(12, 4)
    whole = client.generate(prompt, greedy(40, ignore_eos=True))
    parts = list(client.stream(prompt, greedy(40, ignore_eos=True)))
    assert len(parts) > 2
    for before, after in pairwise(parts):
        assert after.ids[: len(before.ids)] == before.ids
    assert parts[-1].ids == whole.ids
    assert parts[-1].text == whole.text


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_abort_and_disconnect(stand: Stand, algorithm: str) -> None:
    client = stand.speculative(algorithm)
    prompts = ragged(4, 500)
    alone = [client.generate(p, greedy(40, ignore_eos=True)).ids for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        left = pool.submit(_leave, client, prompts[0])
        aborted = pool.submit(
            client.generate, prompts[1], greedy(1500, ignore_eos=True), rid=f"gone-{algorithm}"
        )
        kept = [pool.submit(client.generate, p, greedy(40, ignore_eos=True)) for p in prompts]
        time.sleep(0.3)
        client.abort(f"gone-{algorithm}")
        assert aborted.result().finish == "abort"
        left.result()
        assert [reply.result().ids for reply in kept] == alone
    assert client.settle() == 0


def _leave(client: Client, prompt: list[int]) -> None:
    """Read a little of a stream and hang up."""
    parts = client.stream(prompt, greedy(1500, ignore_eos=True))
    for _, part in zip(range(3), parts, strict=False):
        assert part.ids
    parts.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_retraction(stand: Stand, algorithm: str) -> None:
    """A pool for about five of sixteen requests: some are thrown back, and come out the same."""
    draft = stand.checkpoints.draft(algorithm, {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm])
    target = stand.checkpoints.target("llama")
    small = ("--max-total-tokens", 700, "--schedule-conservativeness", 0.1)
    server = stand.server(stand.spec(algorithm, draft, target, 4, *small))
    prompts = [random_prompt(20 + n, 600 + n) for n in range(16)]
    # With ignore_eos the server would know the length in advance and admit fewer.
    expected = stand.plain().batch(prompts, greedy(90))
    replies = server.client.batch(prompts, greedy(90))
    assert [r.ids for r in replies] == [r.ids for r in expected]
    assert sum(r.meta["num_retractions"] for r in replies) > 0
    assert server.client.settle() == 0
    server.assert_healthy()


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_context_limit_inside_a_block(stand: Stand, algorithm: str, page: int) -> None:
    """Requests that end because the context is full, at every offset inside a block of eight."""
    flags = ("--context-length", 64, "--page-size", page)
    target = stand.checkpoints.target("llama")
    prompts = [random_prompt(30 + n, 700 + n) for n in range(8)]
    params = {"temperature": 0.0, "max_new_tokens": None, "ignore_eos": True}
    plain = stand.server(stand.plain_spec(target, *flags)).client.batch(prompts, params)
    draft = stand.checkpoints.draft(algorithm, {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm])
    server = stand.server(stand.spec(algorithm, draft, target, 7, *flags))
    for _ in range(3):
        replies = server.client.batch(prompts, params)
        assert [r.ids for r in replies] == [r.ids for r in plain]
        assert [r.finish for r in replies] == [r.finish for r in plain]
    assert server.client.settle() == 0
    server.assert_healthy()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_request_larger_than_the_pool(stand: Stand, algorithm: str) -> None:
    """One request may outgrow the pool: it ends with an error, and the server goes on."""
    draft = stand.checkpoints.draft(algorithm, {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm])
    target = stand.checkpoints.target("llama")
    server = stand.server(stand.spec(algorithm, draft, target, 4, "--max-total-tokens", 150))
    prompt = random_prompt(60, 9)
    short = server.client.generate(prompt, greedy(20, ignore_eos=True))
    assert _end_of_long_request(server.client, prompt) in ("abort", "length", "refused")
    assert server.client.generate(prompt, greedy(20, ignore_eos=True)).ids == short.ids
    assert server.client.settle() == 0
    server.assert_healthy()


def _end_of_long_request(client: Client, prompt: list[int]) -> str:
    try:
        return str(client.generate(prompt, greedy(1500, ignore_eos=True)).finish)
    except Refused:
        return "refused"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks(stand: Stand, algorithm: str) -> None:
    """Tensor parallel over gloo: both ranks commit the same tokens, those of one rank."""
    client = stand.speculative(algorithm, None, "--tp-size", 2)
    batches = run_batches(client)
    assert ids_of(batches) == stand.plain_answers("llama")
    assert sum(accepted(batches)[1:]) > 0


def nothing_to_load() -> str:
    """An empty list of named tensors, as SGLang wants it sent."""
    return base64.b64encode(bytes(ForkingPickler.dumps([]))).decode()


def test_replaced_weights_reach_the_draft(stand: Stand) -> None:
    """After new target weights over RPC, drafts are as good as in a server started on them."""
    other = stand.checkpoints.target("llama", seed=23)
    draft = stand.checkpoints.draft("DSPARK", "reduced-vocabulary")
    fresh = stand.server(stand.spec("DSPARK", draft, other, 4)).client
    expected = run_batches(fresh)
    client = stand.speculative("DSPARK", "reduced-vocabulary", "--log-level", "warning")
    before = run_batches(client)
    answer = client.post("/update_weights_from_disk", json={"model_path": str(other)}, timeout=60)
    assert answer.json()["success"], answer.text
    after = run_batches(client)
    assert ids_of(after) == ids_of(expected) != ids_of(before)
    assert accepted(after) == accepted(expected) != accepted(before)
    only_draft = {"selector": "draft"}
    assert client.post("/begin_weight_update", json=only_draft).status_code == 200
    empty = {"serialized_named_tensors": [nothing_to_load()], "selector": "draft"}
    refused = client.post("/update_weights_from_tensor", json=empty)
    assert "keeps the weights it was started with" in refused.text
    assert client.post("/end_weight_update", json={}).status_code == 200
    assert ids_of(run_batches(client)) == ids_of(expected)


def _wander(client: Client, number: int, expected: dict[int, list[int]]) -> None:
    """One request of the soak: it may stop, be aborted, hang up, sample, or run to its length."""
    rng = random.Random(number)
    which = rng.randrange(len(expected))
    prompt, kind = SOAK_PROMPTS[which], rng.random()
    if kind < 0.15:
        rid = f"soak-{number}"
        timer = threading.Timer(rng.uniform(0.0, 0.6), client.abort, [rid])
        timer.start()
        with contextlib.suppress(Refused, httpx.HTTPError):
            client.generate(prompt, greedy(200, ignore_eos=True), rid=rid)
        timer.join()
    elif kind < 0.25:
        _leave(client, prompt)
    elif kind < 0.45:
        hot = {"temperature": 1.0, "max_new_tokens": rng.randint(1, 60)}
        client.generate(prompt, hot | {"stop_token_ids": rng.sample(range(256), 12)})
    else:
        count = rng.randint(1, 48)
        reply = client.generate(prompt, greedy(count, ignore_eos=True))
        assert reply.ids == expected[which][:count]


SOAK_PROMPTS = ragged(12, 1000, longest=50)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_soak(stand: Stand, algorithm: str) -> None:
    """Requests that stop, leave, sample and retract on a tight pool lose nothing."""
    plain = stand.plain().batch(SOAK_PROMPTS, greedy(48, ignore_eos=True))
    expected = {i: reply.ids for i, reply in enumerate(plain)}
    server = _soak_server(stand, algorithm)
    with ThreadPoolExecutor(16) as pool:
        work = [pool.submit(_wander, server.client, n, expected) for n in range(SOAK)]
        for future in work:
            future.result()
    assert server.client.settle() == 0
    server.assert_healthy()
    after: list[Reply] = server.client.batch(SOAK_PROMPTS, greedy(48, ignore_eos=True))
    assert [r.ids for r in after] == list(expected.values())
    assert server.client.settle() == 0


def _soak_server(stand: Stand, algorithm: str) -> Server:
    draft = stand.checkpoints.draft(algorithm, {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm])
    tight = ("--max-total-tokens", 900, "--schedule-conservativeness", 0.1)
    env = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_EXT_SCHEDULER": "sync",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "40",
    }
    target = stand.checkpoints.target("llama")
    return stand.server(stand.spec(algorithm, draft, target, 5, *tight, env=env))
