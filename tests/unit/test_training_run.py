"""A whole run on a tiny target: train, stop, go on, export, evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_ext.training.batches import LessonCache, make_batch, sample_anchors, study
from sglang_ext.training.recipe import Recipe, Run, evaluate_exported, export_run
from sglang_ext.training.shards import ShardWriter, Text, read_texts
from sglang_ext.training.target import PackedLinear, Target
from sglang_ext.training.train import Plan

transformers = pytest.importorskip("transformers")
RECIPE = Recipe(layers=1, gamma=3, draft_vocab=40, markov_rank=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("target")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Texts that count upwards: bigrams suffice to predict them."""
    for name, first in (("train", 0), ("held_out", 5)):
        writer = ShardWriter(tmp_path / name, writer="test", every=100)
        for start in range(first, first + 24):
            tokens = [4 + (start + i) % 30 for i in range(20 + start % 7)]
            writer.add(Text(tokens, 6, "math", "counting"))
        writer.flush()
    return tmp_path


def trainer(target: Path, work: Path, minutes: float) -> Run:
    plan = Plan(minutes=minutes, texts=4, blocks=4, warmup=1)
    return Run(target, work, RECIPE, plan, report=lambda line: None)


def test_shards_come_back(work: Path) -> None:
    texts = read_texts(work / "train")
    assert len(texts) == 24
    assert texts[3].tokens[:3] == [7, 8, 9]
    assert (texts[0].prompt_length, texts[0].kind, texts[0].source) == (6, "math", "counting")


def test_train_resume_export_evaluate(target: Path, work: Path) -> None:
    first = trainer(target, work, 0.01).trainer()
    first.run()
    assert first.step > 0
    second = trainer(target, work, 0.02).trainer()
    assert second.step == first.step
    for mine, theirs in zip(
        second.students[0].draft.parameters(), first.students[0].draft.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    second.run()
    assert second.step > first.step

    folders = export_run(target, work, work / "out")
    assert set(folders) == {"dspark", "dflash"}
    assert json.loads((folders["dspark"] / "config.json").read_text())["draft_vocab_size"] == 40
    results = evaluate_exported(target, work, folders)
    total = results["dspark"].total()
    assert total.rounds > 0
    assert 1.0 <= total.tau <= 4.0
    assert results["dspark"].confidence.shape == (total.rounds, 3)


def test_lessons_from_disk_equal_fresh_ones(target: Path, tmp_path: Path) -> None:
    model = Target(target, slots=2, capacity=32)
    texts = [Text([5, 6, 7, 8, 9], 2, "chat"), Text([9, 8, 7], 1, "chat")]
    fresh = study(model, texts, (1, 3), PackedLinear(model.head_weight))
    cache = LessonCache(tmp_path, recipe="a", limit=10**6)
    assert cache.get(texts[0]) is None
    cache.put(texts[0], fresh[0])
    kept = cache.get(texts[0])
    assert kept is not None
    assert torch.equal(kept.features, fresh[0].features)
    assert torch.equal(kept.probability, fresh[0].probability)
    assert LessonCache(tmp_path, recipe="b", limit=10**6).get(texts[0]) is None
    assert kept.features.shape == (5, 128)

    batch = make_batch(texts, fresh, multiple=4)
    assert batch.tokens.shape == (2, 8)
    anchors = sample_anchors(batch, 5, torch.Generator().manual_seed(0))
    assert sorted(anchors[0].tolist()) == [-1, -1, 1, 2, 3]
    assert sorted(anchors[1].tolist()) == [-1, -1, -1, 0, 1]


def test_unknown_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected dspark, dflash or both"):
        Recipe(drafts=("eagle",))
