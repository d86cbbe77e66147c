"""NEXTN on DeepSeek-V4: the checkpoint's MTP module drafts, and the answers stay what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sglang_ext.tiny_model.deepseek_v4 import write
from tests.e2e.client import Client, Reply, greedy
from tests.e2e.servers import Server
from tests.e2e.stand import Stand
from tests.e2e.workload import accepted, ids_of, random_prompt, run_batches
from tests.oracle.v4 import hf_streams, load_hf
from tests.oracle.v4_mtp import NaiveModule, rounds

pytestmark = pytest.mark.e2e

# Ends before, at and behind the ends of CSA blocks (4) and HCA blocks (128).
LENGTHS = (1, 3, 4, 5, 126, 127, 128, 129)
PARAMS = greedy(14, ignore_eos=True)
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
CHUNKS = ("--chunked-prefill-size", 61)
# algorithm, steps, further flags, environment
CASES: dict[str, tuple[str, int, tuple[object, ...], dict[str, str]]] = {
    "three steps, prompts in chunks": ("NEXTN", 3, CHUNKS, {}),
    "one step, retraction": ("NEXTN", 1, ("--max-total-tokens", 1200), RETRACT),
    "four steps, pages, two ranks": ("EAGLE", 4, ("--page-size", 128, "--tp-size", 2), {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Window, window, CSA, HCA; the module is right about every second time."""
    return write(tmp_path_factory.mktemp("v4") / "model", layers=4, with_mtp=True, mixing=0.25)


def plain(stand: Stand, target: Path) -> Client:
    return stand.server(stand.plain_spec(target, "--disable-overlap-schedule")).client


def drafting(stand: Stand, target: Path, case: str) -> Server:
    algorithm, steps, flags, env = CASES[case]
    speculation = ("--speculative-algorithm", algorithm, "--speculative-num-steps", steps)
    return stand.server(stand.plain_spec(target, *speculation, *flags, env=env))


def answers(client: Client) -> list[list[Reply]]:
    """The standard workload, and prompts that end around the ends of blocks, all at once."""
    prompts = [random_prompt(n, 50 + n) for n in LENGTHS]
    return [*run_batches(client), client.batch(prompts, PARAMS)]


@pytest.fixture(scope="module")
def expected(stand: Stand, target: Path) -> list[list[list[int]]]:
    return ids_of(answers(plain(stand, target)))


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_speculation(
    stand: Stand, target: Path, expected: list[list[list[int]]], case: str
) -> None:
    server = drafting(stand, target, case)
    found = answers(server.client)
    assert ids_of(found) == expected
    counts = accepted(found)
    assert len(counts) == CASES[case][1] + 1
    # A guess among 264 tokens is right one time in 264.
    assert sum(counts[1:]) > 0.3 * sum(counts), counts
    assert server.client.settle() == 0
    if CASES[case][3] == RETRACT:
        assert "#retracted_reqs" in server.log()


def test_rounds_are_those_of_a_naive_module(stand: Stand, target: Path) -> None:
    """As many verifications as the module needs when it is computed anew for every guess."""
    client = drafting(stand, target, "three steps, prompts in chunks").client
    client.flush()
    tensors, raw = load_file(target / "model.safetensors"), (target / "config.json").read_text()
    hf, naive = load_hf(target), NaiveModule(tensors, json.loads(raw))
    for length in (1, 62, 128):
        prompt = random_prompt(length, 900 + length)
        reply = client.generate(prompt, PARAMS)
        streams = hf_streams(hf, prompt + reply.ids)
        wanted = rounds(naive, streams, prompt, reply.ids, steps=3)
        assert reply.meta["spec_verify_ct"] == wanted, length


def test_prefix_hits_at_every_kind_of_place(stand: Stand, target: Path) -> None:
    client = drafting(stand, target, "three steps, prompts in chunks").client
    shared = random_prompt(131, 1)
    whole = shared + client.generate(shared, PARAMS).ids
    cuts = (1, 3, 4, 5, 61, 126, 127, 128, 129, 131, 132, len(whole) - 1)
    prompts = [whole[:cut] + random_prompt(5, cut) for cut in cuts]
    alone = plain(stand, target)
    cold = [_cold(c, p) for c in (alone, client) for p in prompts]
    client.flush()
    client.generate(shared, PARAMS)
    warm = [client.generate(prompt, greedy(6)) for prompt in prompts]
    assert [r.ids for r in cold] == [r.ids for r in warm] * 2
    # A row of the module belongs to two tokens, so a hit ends one token earlier than the target's.
    assert all(r.meta["cached_tokens"] >= cut - 1 for r, cut in zip(warm, cuts, strict=True))
    kept = [_rounds(r) for r in warm]
    assert kept == [_rounds(r) for r in cold[len(cuts) :]]


def _cold(client: Client, prompt: list[int]) -> Reply:
    client.flush()
    return client.generate(prompt, greedy(6))


def _rounds(reply: Reply) -> int:
    return int(reply.meta["spec_verify_ct"])
