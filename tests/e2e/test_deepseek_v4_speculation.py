"""Speculation on DeepSeek-V4: the bundled DSpark draft, and rejection at every place of a block."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    """A server whose drafts come from `texts`, right for a changing number of rows."""
    script = folder / "script.json"
    script.write_text(json.dumps(texts))
    env = dict(spec.env) | {VARIABLE: SCRIPTED, SCRIPT: str(script)}
    return stand.server(Spec.of(*spec.argv, env=env))


def test_rejection_at_every_place(
    stand: Stand, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every accepted count of gamma 1 to 8, at positions around the ends of blocks.

    One server drafts eight tokens; smaller gammas are asked for by the requests.
    """
    prompts = [random_prompt(edge, 7000 + edge) for edge in EDGES]
    params = greedy(NEW, ignore_eos=True)
    answers = plain(stand, target).client.batch(prompts, params)
    texts = [p + list(a.ids) for p, a in zip(prompts, answers, strict=True)]
    draft = stand.checkpoints.draft("DFLASH", "zlab")
    spec = stand.spec("DFLASH", draft, target, 8)
    client = scripted(stand, spec, texts, tmp_path_factory.mktemp("script")).client
    for gamma in range(1, 9):
        client.flush()
        capped = params | {"custom_params": {"speculative": True, "gamma": gamma}}
        replies = client.batch(prompts, capped)
        assert [r.ids for r in replies] == [a.ids for a in answers], gamma
        counts = accepted([replies])
        assert len(counts) == gamma + 1
        assert all(counts), f"gamma {gamma}: accepted counts that never occurred: {counts}"


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
