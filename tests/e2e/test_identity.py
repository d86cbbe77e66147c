"""Greedy answers with speculation are the answers without it, in fp32, for every kind of draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.stand import Stand
from tests.e2e.workload import accepted, ids_of, run_batches
from tests.tiny import make_draft

pytestmark = pytest.mark.e2e

# (draft, gamma): each head and layout, and every gamma from 1 to 8 for each algorithm.
DSPARK_CASES = (
    ("vanilla", 1),
    ("vanilla", 7),
    ("gated", 2),
    ("gated", 5),
    ("rnn", 4),
    ("rnn", 6),
    ("confidence-of-hidden", 8),
    ("no-confidence", 3),
    ("reduced-vocabulary", 4),
    ("padded-vocabulary", 5),
    ("own-position", 5),
    ("sliding", 4),
)
DFLASH_CASES = (
    ("zlab", 1),
    ("zlab", 4),
    ("zlab", 7),
    ("anchor", 2),
    ("anchor", 6),
    ("sliding", 3),
    ("all-sliding", 4),
    ("dflash2", 5),
    ("reduced-vocabulary", 8),
)
OTHER_TARGETS = ("qwen2", "qwen3", "qwen3_moe")


def _check(stand: Stand, algorithm: str, name: str, gamma: int, kind: str, **env: str) -> None:
    client = stand.speculative(algorithm, name, kind=kind, gamma=gamma, env=env)
    batches = run_batches(client)
    assert ids_of(batches) == stand.plain_answers(kind)
    histogram = accepted(batches)
    # Every number of accepted drafts but the rarest occurred, and none beyond gamma.
    assert len(histogram) <= gamma + 1
    assert all(histogram[: min(gamma, 4)]), histogram
    assert sum(histogram[1:]) > 0


@pytest.mark.parametrize(("name", "gamma"), DSPARK_CASES)
def test_dspark(stand: Stand, name: str, gamma: int) -> None:
    _check(stand, "DSPARK", name, gamma, "llama")


@pytest.mark.parametrize(("name", "gamma"), DFLASH_CASES)
def test_dflash(stand: Stand, name: str, gamma: int) -> None:
    _check(stand, "DFLASH", name, gamma, "llama")


@pytest.mark.parametrize("kind", OTHER_TARGETS)
@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH"])
def test_other_targets(stand: Stand, algorithm: str, kind: str) -> None:
    name = {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm]
    _check(stand, algorithm, name, 4, kind)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_scheduled(stand: Stand, mode: str) -> None:
    """The scheduler decides how much is verified, never what is said."""
    env = {"SGLANG_EXT_SCHEDULER": mode, "SGLANG_EXT_DRAFT_PAYS": "0"}
    client = stand.speculative("DSPARK", "vanilla", gamma=6, env=env)
    assert ids_of(run_batches(client)) == stand.plain_answers("llama")


def test_defaults(stand: Stand) -> None:
    """Nothing set: gamma from the checkpoint, the scheduler on, drafting only while it pays."""
    env = {"SGLANG_EXT_SCHEDULER": "", "SGLANG_EXT_DRAFT_PAYS": ""}
    client = stand.speculative("DSPARK", "vanilla", gamma=None, env=env)
    assert ids_of(run_batches(client)) == stand.plain_answers("llama")


def test_overlap(stand: Stand) -> None:
    """Overlap scheduling, off on a CPU unless asked for, changes no answer."""
    for algorithm in ("DSPARK", "DFLASH"):
        client = stand.speculative(algorithm, env={"SGLANG_EXT_OVERLAP": "1"})
        assert ids_of(run_batches(client)) == stand.plain_answers("llama")


def test_page_size(stand: Stand) -> None:
    for algorithm in ("DSPARK", "DFLASH"):
        client = stand.speculative(algorithm, None, "--page-size", 16)
        assert ids_of(run_batches(client)) == stand.plain_answers("llama")


def test_chunked_prefill(stand: Stand) -> None:
    """Prompts of up to 70 tokens, 8 at a time: draft K/V are written chunk by chunk."""
    for algorithm in ("DSPARK", "DFLASH"):
        client = stand.speculative(algorithm, None, "--chunked-prefill-size", 8)
        assert ids_of(run_batches(client)) == stand.plain_answers("llama")


def test_beyond_the_drafts_own_context(stand: Stand) -> None:
    """A draft whose config ends at position 48 drafts on, and as well as one that goes further."""
    target = stand.checkpoints.target("llama")
    short = stand.checkpoints.dspark("vanilla", max_position_embeddings=48)
    client = stand.server(stand.spec("DSPARK", short, target, 4)).client
    batches = run_batches(client)
    assert ids_of(batches) == stand.plain_answers("llama")
    assert accepted(batches) == accepted(run_batches(stand.speculative("DSPARK")))


def test_tied_embeddings(stand: Stand, tmp_path: Path) -> None:
    """A target whose head is its embedding, and a draft in bf16 beside it."""
    target = stand.checkpoints.target("llama", tie_word_embeddings=True)
    draft = make_draft(tmp_path / "draft", "DSPARK", target, torch_dtype="bfloat16")
    tensors = load_file(draft / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, draft / "model.safetensors")
    plain = stand.server(stand.plain_spec(target)).client
    client = stand.server(stand.spec("DSPARK", draft, target, 4)).client
    batches = run_batches(client)
    assert ids_of(batches) == ids_of(run_batches(plain))
    assert sum(accepted(batches)[1:]) > 0
