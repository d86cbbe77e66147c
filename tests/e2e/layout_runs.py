"""The workloads of `core.support`, sent to one server: what came back, for comparison by token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.client import Client, Prompt, Reply, greedy
from tests.e2e.workload import lengths, ragged, random_prompt

# Prefill chunk of one DP rank; the long prompts are several of it, and not a multiple.
CHUNK = 32
LONG = 107

Answers = list[list[int]]


def short(client: Client, dp: int) -> Answers:
    return [client.generate(random_prompt(17, 1), greedy(16)).ids]


def ragged_batch(client: Client, dp: int) -> Answers:
    return _ids(client.batch(ragged(10, 300), lengths(10, 22)))


def chunked(client: Client, dp: int) -> Answers:
    alone = client.generate(random_prompt(LONG, 9), greedy(10)).ids
    mixed = [random_prompt(LONG + 9 * i, 70 + i) if i % 2 else p for i, p in enumerate(SHORT)]
    return [alone, *_ids(client.batch(mixed, lengths(len(mixed), 16)))]


SHORT = ragged(4, 700, longest=20)


def one_idle_rank(client: Client, dp: int) -> Answers:
    """With DP ranks every request names its own; the others have none."""
    answers: Answers = []
    for rank in range(2):
        where = {"routed_dp_rank": rank} if dp > 1 else {}
        bodies: list[tuple[Prompt, dict[str, object], dict[str, object]]] = [
            (prompt, greedy(12 + i), where) for i, prompt in enumerate(ragged(3, 500 + rank))
        ]
        answers += _ids(client.together(bodies))
        # A prompt of one token alone: half of its prefill is empty where that is cut in two.
        answers.append(client.generate([65 + rank], greedy(6), **where).ids)
    return answers


def abort(client: Client, dp: int) -> Answers:
    """Two long requests are cut off by their clients while four others run to their end."""

    def leave(seed: int) -> None:
        for reply in client.stream(random_prompt(25, seed), greedy(400, ignore_eos=True)):
            if len(reply.ids) > 3:
                break

    with ThreadPoolExecutor(3) as pool:
        cut = [pool.submit(leave, 40 + i) for i in range(2)]
        stay = pool.submit(client.batch, ragged(4, 900), lengths(4, 24))
        for one in cut:
            one.result()
        answers = _ids(stay.result())
    return answers + short(client, dp)


def _ids(replies: list[Reply]) -> Answers:
    return [reply.ids for reply in replies]


RUNS: dict[str, Callable[[Client, int], Answers]] = {
    "short": short,
    "ragged": ragged_batch,
    "chunked": chunked,
    "one idle rank": one_idle_rank,
    "abort": abort,
}
