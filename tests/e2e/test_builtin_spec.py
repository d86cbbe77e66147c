"""SGLang's own algorithms on the portable CPU: greedy answers equal to those without speculation.

EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM run SGLang's workers unchanged, on torch versions of the
kernels they call. NGRAM's corpus is C++ that SGLang compiles at the first start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import builtin_drafts
from tests.e2e.stand import Stand
from tests.e2e.workload import accepted, ids_of, ragged, run_batches

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Case:
    """One way of speculating.

    draft: which of `make_drafts` it reads; None for n-grams and for a target with its own layer.
    tree: steps, branches per step and rows to verify.
    """

    algorithm: str
    draft: str | None
    tree: tuple[int, int, int] | None
    flags: tuple[object, ...] = ()

    def argv(self, drafts: dict[str, Path]) -> list[object]:
        argv: list[object] = ["--speculative-algorithm", self.algorithm, *self.flags]
        if self.draft is not None:
            argv += ["--speculative-draft-model-path", drafts[self.draft]]
        if self.tree is not None:
            steps, branches, rows = self.tree
            argv += ["--speculative-num-steps", steps, "--speculative-eagle-topk", branches]
            argv += ["--speculative-num-draft-tokens", rows]
        return argv


LLAMA_CASES = {
    "eagle-chain": Case("EAGLE", "eagle", (3, 1, 4)),
    "eagle-one-step": Case("EAGLE", "eagle", (1, 1, 2)),
    "eagle-tree": Case("EAGLE", "eagle", (3, 3, 9)),
    "eagle-pages": Case("EAGLE", "eagle", (4, 1, 5), ("--page-size", 16)),
    "eagle3-tree": Case("EAGLE3", "eagle3", (3, 2, 6)),
    "standalone-chain": Case("STANDALONE", "standalone", (4, 1, 5)),
    "ngram": Case("NGRAM", None, None, ("--speculative-num-draft-tokens", 7)),
}
NEXTN_CASES = {
    "one-step": Case("NEXTN", None, (1, 1, 2)),
    "chain": Case("NEXTN", None, (3, 1, 4)),
    "tree": Case("NEXTN", None, (2, 2, 5)),
}


@pytest.fixture(scope="module")
def drafts(stand: Stand, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("builtin")
    target = stand.checkpoints.target("llama")
    return {
        "eagle": builtin_drafts.make_eagle(folder / "eagle", target),
        "eagle3": builtin_drafts.make_eagle3(folder / "eagle3", target),
        "standalone": builtin_drafts.make_standalone(folder / "standalone"),
    }


@pytest.fixture(scope="module")
def nextn_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin_drafts.make_nextn_target(tmp_path_factory.mktemp("nextn") / "target")


@pytest.fixture(scope="module")
def nextn_plain_answers(stand: Stand, nextn_target: Path) -> list[list[list[int]]]:
    return ids_of(run_batches(stand.server(stand.plain_spec(nextn_target)).client))


def check(stand: Stand, target: Path, argv: Sequence[object], plain: list[list[list[int]]]) -> None:
    """Alone and in batches, ragged prompts and lengths; and the drafts were neither all refused
    nor all accepted, so that every branch of the verification ran."""
    client = stand.server(stand.plain_spec(target, *argv)).client
    batches = run_batches(client)
    assert ids_of(batches) == plain
    histogram = accepted(batches)
    assert histogram[0] > 0, histogram
    assert sum(histogram[1:]) > 0, histogram
    # The prefix cache now holds what was said: the answers stay the same.
    again = client.batch(ragged(5, 300), [{"temperature": 0.0, "max_new_tokens": 12}] * 5)
    assert [reply.ids for reply in again] == [ids[:12] for ids in plain[2]]


@pytest.mark.parametrize("name", LLAMA_CASES)
def test_llama(stand: Stand, drafts: dict[str, Path], name: str) -> None:
    target = stand.checkpoints.target("llama")
    check(stand, target, LLAMA_CASES[name].argv(drafts), stand.plain_answers("llama"))


@pytest.mark.parametrize("name", NEXTN_CASES)
def test_nextn(
    stand: Stand, nextn_target: Path, nextn_plain_answers: list[list[list[int]]], name: str
) -> None:
    check(stand, nextn_target, NEXTN_CASES[name].argv({}), nextn_plain_answers)


@pytest.mark.parametrize("name", ["eagle-tree", "ngram"])
def test_requests_with_a_temperature_are_sampled(
    stand: Stand, drafts: dict[str, Path], name: str
) -> None:
    """The distribution itself is tested on the verification step, without a server."""
    argv = LLAMA_CASES[name].argv(drafts)
    client = stand.server(stand.plain_spec(stand.checkpoints.target("llama"), *argv)).client
    prompt = ragged(1, 100)[0]
    hot = client.batch([prompt] * 8, {"temperature": 2.0, "max_new_tokens": 12})
    assert len({tuple(reply.ids) for reply in hot}) > 1
    one = client.generate(prompt, {"temperature": 2.0, "top_k": 1, "max_new_tokens": 12})
    assert one.ids == stand.plain_answers("llama")[0][0][:12]
