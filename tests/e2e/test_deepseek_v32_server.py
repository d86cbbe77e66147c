"""A tiny DeepSeek-V3.2 behind a real server: equal to HF, however its requests arrive.

The context of most requests is longer than the 16 tokens a row may attend to, so nearly every
token depends on what the indexer selects.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.e2e.client import Client, greedy
from tests.e2e.stand import Stand
from tests.e2e.workload import (
    BATCHES,
    accepted,
    ids_of,
    lengths,
    ragged,
    random_prompt,
    run_batches,
)
from tests.tiny import EOS

pytestmark = pytest.mark.e2e

KIND = "deepseek_v32"
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
# Lengths that the drawn prompts of the workload do not reach.
LONG = (15, 16, 17, 18, 127, 300)


def _server(stand: Stand, *flags: object, env: Mapping[str, str] | None = None) -> Client:
    target = stand.checkpoints.target(KIND)
    return stand.server(stand.plain_spec(target, *flags, env=env)).client


@pytest.mark.oracle
def test_greedy_ids_equal_transformers(stand: Stand) -> None:
    from tests.oracle.v32 import hf_greedy, load_hf

    hf = load_hf(stand.checkpoints.target(KIND))
    for (count, seed), answers in zip(BATCHES, stand.plain_answers(KIND), strict=True):
        for prompt, params, ids in zip(
            ragged(count, seed), lengths(count, 33), answers, strict=True
        ):
            assert ids == hf_greedy(hf, prompt, params["max_new_tokens"], EOS)
    prompts = [random_prompt(n, n) for n in LONG]
    for prompt, reply in zip(prompts, stand.plain(KIND).batch(prompts, greedy(40)), strict=True):
        assert reply.ids == hf_greedy(hf, prompt, 40, EOS)


def test_answers_are_varied(stand: Stand) -> None:
    answers = [ids for batch in stand.plain_answers(KIND) for ids in batch]
    assert len({tuple(ids) for ids in answers}) > 0.8 * len(answers)
    assert sum(len(set(ids)) for ids in answers) / len(answers) > 8


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 127, 129])
def test_chunked_prefill(stand: Stand, chunk: int) -> None:
    """Every other size with decoding requests in the same forwards."""
    mixed = ("--enable-mixed-chunk",) if chunk in (3, 7, 129) else ()
    client = _server(stand, "--chunked-prefill-size", chunk, *mixed)
    assert ids_of(run_batches(client)) == stand.plain_answers(KIND)


def test_aborts_inside_a_prompt(stand: Stand) -> None:
    """Between any two chunks; the next requests get the slots, and none is lost."""
    client = _server(stand, "--chunked-prefill-size", 7, "--enable-mixed-chunk")
    for n in range(3):
        client.flush()
        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(client.generate, random_prompt(1500, n), greedy(9), rid=f"gone-{n}")
            while client.load()["num_used_tokens"] < 150 * n + 1:
                assert not gone.done()
            client.abort(f"gone-{n}")
            assert gone.result().finish == "abort"
    assert ids_of(run_batches(client)) == stand.plain_answers(KIND)
    assert client.settle() == 0


@dataclass(frozen=True)
class Branches:
    """A text (a prompt and its answer), and prompts that leave it behind token `cuts[i]`."""

    shared: list[int]
    first: list[int]
    cuts: tuple[int, ...]
    prompts: list[list[int]]
    cold: list[list[int]]


@pytest.fixture(scope="module")
def branches(stand: Stand) -> Branches:
    """At every offset, inside the answer as well; nothing is cached."""
    client = _server(stand, "--disable-radix-cache")
    shared, rng = random_prompt(67, 1), random.Random(4)
    first = client.generate(shared, greedy(20, ignore_eos=True)).ids
    whole = shared + first
    cuts = tuple(range(len(whole) - 1, 0, -1))
    prompts = [whole[:cut] + rng.choices(range(256), k=5) for cut in cuts]
    cold = [reply.ids for reply in client.batch(prompts, greedy(12))]
    return Branches(shared, first, cuts, prompts, cold)


@pytest.mark.parametrize("flags", [(), ("--page-size", 16), ("--page-size", 64)])
def test_prefix_hits_at_every_offset(
    stand: Stand, branches: Branches, flags: tuple[object, ...]
) -> None:
    client = _server(stand, *flags)
    client.flush()
    found = client.generate(branches.shared, greedy(20, ignore_eos=True)).ids
    assert found == branches.first
    warm = client.batch(branches.prompts, greedy(12))
    assert [reply.ids for reply in warm] == branches.cold
    page = int(str(flags[1])) if flags else 1
    for reply, cut in zip(warm, branches.cuts, strict=True):
        assert reply.meta["cached_tokens"] >= cut // page * page, cut


@pytest.mark.parametrize("page", [16, 64])
def test_page_size(stand: Stand, page: int) -> None:
    client = _server(stand, "--page-size", page, "--chunked-prefill-size", 64)
    assert ids_of(run_batches(client)) == stand.plain_answers(KIND)


def test_forced_retraction(stand: Stand) -> None:
    target = stand.checkpoints.target(KIND)
    spec = stand.plain_spec(target, "--max-total-tokens", 1200, env=RETRACT)
    server = stand.server(spec)
    assert ids_of(run_batches(server.client)) == stand.plain_answers(KIND)
    assert "#retracted_reqs" in server.log()
    assert server.client.settle() == 0


def test_tensor_parallel(stand: Stand) -> None:
    client = _server(stand, "--tp-size", 2)
    assert ids_of(run_batches(client)) == stand.plain_answers(KIND)


@pytest.mark.parametrize("gamma", [1, 3, 7])
@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH"])
def test_speculation(stand: Stand, algorithm: str, gamma: int) -> None:
    """The draft attends with the dense backend while its target selects."""
    client = stand.speculative(algorithm, kind=KIND, gamma=gamma)
    batches = run_batches(client)
    assert ids_of(batches) == stand.plain_answers(KIND)
    histogram = accepted(batches)
    assert len(histogram) <= gamma + 1
    assert all(histogram[: min(gamma, 4)]), histogram
    assert sum(histogram[1:]) > 0


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH"])
@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (("--page-size", 16), {}),
        (("--page-size", 64, "--chunked-prefill-size", 64), {}),
        (("--chunked-prefill-size", 7), {}),
        (("--max-total-tokens", 1500), RETRACT),
        (("--tp-size", 2), {}),
    ],
    ids=["page 16", "page 64", "chunks of 7", "retraction", "two ranks"],
)
def test_speculation_under(
    stand: Stand, algorithm: str, flags: tuple[object, ...], env: dict[str, str]
) -> None:
    client = stand.speculative(algorithm, None, *flags, kind=KIND, env=env)
    batches = run_batches(client)
    assert ids_of(batches) == stand.plain_answers(KIND)
    assert sum(accepted(batches)[1:]) > 0


def test_scheduled_verification(stand: Stand) -> None:
    """Requests of one pass verify unequal numbers of rows."""
    env = {"SGLANG_EXT_SCHEDULER": "sync", "SGLANG_EXT_DRAFT_PAYS": "0"}
    client = stand.speculative("DSPARK", kind=KIND, gamma=6, env=env)
    assert ids_of(run_batches(client)) == stand.plain_answers(KIND)


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH"])
def test_prefix_hit_drafts_as_well(stand: Stand, algorithm: str) -> None:
    client = stand.speculative(algorithm, kind=KIND)
    shared = random_prompt(41, 1)
    for n, suffix in enumerate(([], random_prompt(3, 2), random_prompt(11, 3))):
        prompt = shared + suffix
        client.flush()
        cold = client.generate(prompt, greedy(40, ignore_eos=True))
        client.flush()
        client.batch(ragged(6, 50 + n), greedy(20))
        client.generate(shared + random_prompt(9, 60 + n), greedy(20))
        warm = client.generate(prompt, greedy(40, ignore_eos=True))
        assert warm.meta["cached_tokens"] >= len(shared) - 1
        assert (warm.ids, warm.accepted) == (cold.ids, cold.accepted)
