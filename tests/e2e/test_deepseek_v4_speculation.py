"""Speculation on DeepSeek-V4: the bundled DSpark draft, and rejection at every place of a block."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.tiny_model.deepseek_v4 import write
from tests.e2e.client import Client, greedy
from tests.e2e.faults import VARIABLE
from tests.e2e.scripted_draft import SCRIPT, SCRIPTED
from tests.e2e.servers import Server, Spec
from tests.e2e.stand import STEADY, Stand
from tests.e2e.workload import accepted, ids_of, ragged, random_prompt, run_batches

pytestmark = pytest.mark.e2e

# Tokens of context that end before, at and behind the ends of CSA blocks (4) and HCA blocks (128).
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 251, 255)
NEW = 24
# A target that both drafts guess often enough for.
KIND = "deepseek_v4"
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
ALGORITHMS = ("DSPARK", "DFLASH")
# Pages, and chunks that cut blocks of 4 and of 128 where a page lets them.
PAGED = (
    ("--page-size", 1, "--chunked-prefill-size", 31),
    ("--page-size", 4, "--chunked-prefill-size", 36),
    ("--page-size", 128, "--chunked-prefill-size", 256),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers (window, window, CSA, HCA), the depth that the dense drafts were made for."""
    out = tmp_path_factory.mktemp("v4") / "model"
    words = ["tiny-model", "deepseek-v4", "--out", str(out), "--layers", "4"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"--model-path {out} --dtype float32 --speculative-algorithm DSPARK" in result.output
    return out


def plain(stand: Stand, target: Path) -> Server:
    return stand.server(stand.plain_spec(target, "--disable-overlap-schedule"))


def bundled(stand: Stand, target: Path, gamma: int, *flags: object) -> Server:
    """DSPARK with the draft inside the target; no draft path is given."""
    speculation = (
        "--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", gamma + 1,
    )  # fmt: skip
    return stand.server(stand.plain_spec(target, *speculation, *flags, env=STEADY))


def test_bundled_draft_changes_nothing(stand: Stand, target: Path) -> None:
    expected = ids_of(run_batches(plain(stand, target).client))
    for gamma in (5, 2):
        found = run_batches(bundled(stand, target, gamma).client)
        assert ids_of(found) == expected, gamma
        assert sum(accepted(found)[1:]) > 0


def scripted(stand: Stand, spec: Spec, texts: list[list[int]], folder: Path) -> Server:
    """A server whose drafts come from `texts`, right for as many rows as a request asks for."""
    script = folder / "script.json"
    script.write_text(json.dumps(texts))
    env = dict(spec.env) | {VARIABLE: SCRIPTED, SCRIPT: str(script)}
    return stand.server(Spec.of(*spec.argv, env=env))


# Every position modulo 128, the length of the longest block, and what is behind its end.
WALKED = 142


@dataclass(frozen=True)
class Walk:
    """A request whose verifications of 1 + gamma rows keep 1 + kept, from position `first` on."""

    gamma: int
    kept: int
    first: int

    @property
    def rid(self) -> str:
        return f"{self.kept}-of-{self.gamma}-from-{self.first}"

    @property
    def params(self) -> dict[str, Any]:
        custom = {"speculative": True, "gamma": self.gamma}
        return greedy(WALKED, ignore_eos=True, custom_params=custom)


# From each of 1 + kept places: all positions are met.
WALKS = [
    Walk(gamma, kept, 2 + lag)
    for gamma in range(1, 9)
    for kept in range(gamma + 1)
    for lag in range(kept + 1)
]


def test_rejection_at_every_place(
    stand: Stand, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every accepted count of gamma 1 to 8 at every position modulo 4 and 128.

    One text, of which every beginning is a prompt that the rest answers; all walks run at once.
    """
    length = max(walk.first for walk in WALKS) + WALKED
    start = random_prompt(2, 7000)
    params = greedy(length - 2, ignore_eos=True)
    text = start + plain(stand, target).client.generate(start, params).ids
    assert len(set(text)) > 30
    draft = stand.checkpoints.draft("DFLASH", "zlab")
    room = ("--max-running-requests", len(WALKS), "--max-total-tokens", len(WALKS) * (length + 16))
    spec = stand.spec("DFLASH", draft, target, 8, *room)
    client = scripted(stand, spec, [text], tmp_path_factory.mktemp("script")).client
    prompts, rids = [text[: walk.first] for walk in WALKS], [walk.rid for walk in WALKS]
    replies = client.batch(prompts, [walk.params for walk in WALKS], rid=rids)
    met = set()
    for walk, reply in zip(WALKS, replies, strict=True):
        assert reply.ids == text[walk.first : walk.first + WALKED], walk
        # The last round may end with the answer.
        rounds = reply.accepted[walk.kept]
        assert sum(reply.accepted) - rounds <= 1, (walk, reply.accepted)
        met |= {
            (walk.gamma, walk.kept, (walk.first + n * (walk.kept + 1)) % 128) for n in range(rounds)
        }
    assert len(met) == sum(128 * (gamma + 1) for gamma in range(1, 9))


def drafted(
    stand: Stand, algorithm: str, *flags: object, env: dict[str, str] | None = None
) -> Server:
    """DSPARK with the draft inside the target, DFLASH with a separate one."""
    target = stand.checkpoints.target(KIND)
    if algorithm == "DFLASH":
        draft = stand.checkpoints.draft("DFLASH", "zlab", KIND)
        return stand.server(stand.spec("DFLASH", draft, target, 4, *flags, env=env))
    flags = ("--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", 5, *flags)
    return stand.server(stand.plain_spec(target, *flags, env=STEADY | (env or {})))


def edges() -> list[list[int]]:
    return [random_prompt(edge, 7000 + edge) for edge in EDGES]


@pytest.fixture(scope="module")
def expected(stand: Stand) -> list[list[int]]:
    target = stand.checkpoints.target(KIND)
    return [r.ids for r in plain(stand, target).client.batch(edges(), greedy(NEW, ignore_eos=True))]


def check_edges(client: Client, expected: list[list[int]]) -> None:
    replies = client.batch(edges(), greedy(NEW, ignore_eos=True))
    assert [r.ids for r in replies] == expected
    assert sum(accepted([replies])[1:]) > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("flags", PAGED, ids=lambda flags: f"page {flags[1]}")
def test_pages_chunks_and_prefix_hits(
    stand: Stand, expected: list[list[int]], algorithm: str, flags: tuple[int, ...]
) -> None:
    """A prompt whose beginning is cached is drafted for as well as one that is not."""
    client, page = drafted(stand, algorithm, *flags).client, flags[1]
    client.flush()
    check_edges(client, expected)
    params = greedy(NEW, ignore_eos=True)
    # The draft reads a window of 16 behind what is shared, the target a block of 4 or 128.
    for n, length in enumerate((41, 126, 128, 131)):
        shared = random_prompt(length, 1)
        prompt = shared + random_prompt(3 * n, 2 + n)
        client.flush()
        cold = client.generate(prompt, params)
        client.flush()
        client.batch(ragged(6, 50 + n), greedy(12))
        client.generate(shared + random_prompt(9, 60 + n), greedy(12))
        warm = client.generate(prompt, params)
        assert warm.meta["cached_tokens"] >= (len(shared) - 1) // page * page
        assert (warm.ids, warm.accepted) == (cold.ids, cold.accepted), length
    # Every prompt is a hit now, and one request reads what another of another length left.
    check_edges(client, expected)
    check_edges(client, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("flags", PAGED[:2], ids=lambda flags: f"page {flags[1]}")
def test_aborts_inside_a_prompt(
    stand: Stand, expected: list[list[int]], algorithm: str, flags: tuple[object, ...]
) -> None:
    """Beside requests that draft; the next ones get the slots, and none is lost."""
    client = drafted(stand, algorithm, *flags).client
    params = greedy(NEW, ignore_eos=True)
    for n in range(3):
        client.flush()
        with ThreadPoolExecutor(2) as pool:
            gone = pool.submit(client.generate, random_prompt(1500, n), params, rid=f"gone-{n}")
            while client.load()["num_used_tokens"] < 150 * n + 1:
                assert not gone.done()
            beside = pool.submit(client.generate, edges()[9 + n], params)
            client.abort(f"gone-{n}")
            assert gone.result().finish == "abort"
            assert beside.result().ids == expected[9 + n]
    check_edges(client, expected)
    assert client.settle() == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forced_retraction(stand: Stand, expected: list[list[int]], algorithm: str) -> None:
    server = drafted(stand, algorithm, "--max-total-tokens", 1200, env=RETRACT)
    check_edges(server.client, expected)
    assert "#retracted_reqs" in server.log()
    assert server.client.settle() == 0


def test_missing_draft_tensor_is_named(stand: Stand, tmp_path: Path) -> None:
    """A config that promises a draft the files do not hold stops the start."""
    folder = write(tmp_path / "model", layers=4)
    config = json.loads((folder / "config.json").read_text())
    promised = json.loads((write(tmp_path / "other", layers=4, with_dspark=True) / "config.json")
                          .read_text())  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | promised))
    spec = stand.plain_spec(folder, "--speculative-algorithm", "DSPARK")
    code, log, _ = stand.pool.launch_and_wait(spec)
    assert code not in (0, None)
    assert "mtp.0." in log
    assert "bundled draft" in log
