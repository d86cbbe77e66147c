"""Draft checkpoints: every public layout is read, everything else is refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_ext.core.spec.draft_config import (
    DraftConfig,
    TargetFacts,
    check_gamma,
    default_target_layer_ids,
    parse,
)
from sglang_ext.core.spec.draft_fields import DraftConfigError, read_config
from sglang_ext.core.spec.draft_tensors import (
    canonical,
    check_tensors,
    optional_tensors,
    padded_tensors,
    read_headers,
    required_tensors,
)
from tests.tiny import HIDDEN, LAYERS, VOCAB, draft_config

TARGET = TargetFacts(LAYERS, HIDDEN, VOCAB, rope_theta=10000.0)


def _parse(algorithm: str, **more: Any) -> DraftConfig:
    return parse(draft_config(algorithm, **more), algorithm=algorithm, target=TARGET)


def test_dspark_block_size_is_gamma_and_the_anchor_predicts() -> None:
    config = _parse("DSPARK", gamma=5)
    assert (config.max_gamma, config.query_rows(5), config.anchor_predicts) == (5, 5, True)


def test_dspark_without_the_anchor_row_runs_one_row_more() -> None:
    config = _parse("DSPARK", gamma=5, sample_from_anchor=False)
    assert (config.max_gamma, config.query_rows(5), config.anchor_predicts) == (5, 6, False)


def test_z_lab_block_size_counts_the_anchor() -> None:
    config = _parse("DFLASH", gamma=5)
    assert (config.block_size, config.max_gamma, config.query_rows(5)) == (6, 5, 6)


def test_deepspec_dflash_predicts_from_the_anchor() -> None:
    config = _parse(
        "DFLASH",
        architectures=["Qwen3DFlashModel"],
        block_size=7,
        dflash_config=None,
        mask_token_id=257,
        target_layer_ids=[0, 1, 2],
    )
    assert (config.max_gamma, config.query_rows(7), config.anchor_predicts) == (7, 7, True)


@pytest.mark.parametrize(
    ("layers", "draft", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (64, 10, (1, 8, 14, 21, 28, 34, 41, 48, 54, 61)),
        (30, 1, (15,)),
    ],
)
def test_published_layer_rule(layers: int, draft: int, expected: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, draft) == expected


def test_missing_layer_ids_follow_the_rule_and_are_marked() -> None:
    raw = draft_config("DFLASH", layers=1)
    del raw["dflash_config"]["target_layer_ids"]
    config = parse(raw, algorithm="DFLASH", target=TARGET)
    assert config.target_layer_ids == (2,)
    assert config.target_layer_ids_guessed


def test_sliding_layers_are_causal_unless_told_otherwise() -> None:
    types = ["sliding_attention", "full_attention"]
    config = _parse("DFLASH", layer_types=types, sliding_window=16)
    assert config.layer_windows == (16, 0)
    assert config.layer_causal == (True, False)
    both = _parse("DFLASH", layer_types=types, sliding_window=16, is_causal=False)
    assert both.layer_causal == (False, False)


def test_rows_beyond_the_targets_vocabulary_are_padding() -> None:
    padded = -(-VOCAB // 256) * 256
    assert padded > VOCAB
    for change in ({}, {"draft_vocab_size": padded}):
        config = _parse("DSPARK", vocab_size=padded, **change)
        assert (config.vocab_size, config.draft_vocab_size) == (VOCAB, VOCAB)
        assert config.stored_vocab_size == config.stored_draft_vocab_size == padded
        names = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        assert padded_tensors(config) == names
        assert {required_tensors(config)[name][0] for name in names} == {padded}
    reduced = _parse("DSPARK", vocab_size=padded, draft_vocab_size=VOCAB // 2)
    assert (reduced.draft_vocab_size, reduced.stored_draft_vocab_size) == (VOCAB // 2,) * 2
    assert padded_tensors(reduced) == {"markov_head.markov_w1.weight"}


@pytest.mark.parametrize(
    ("algorithm", "change", "field"),
    [
        ("DSPARK", {"vocab_size": VOCAB + 1}, "vocab_size"),
        ("DSPARK", {"hidden_size": 32}, "hidden_size"),
        ("DSPARK", {"vocab_size": 100}, "vocab_size"),
        ("DSPARK", {"num_target_layers": 9}, "num_target_layers"),
        ("DSPARK", {"rope_theta": 500000.0}, "rope_theta"),
        ("DSPARK", {"target_layer_ids": [0, 1, 9]}, "target_layer_ids"),
        ("DSPARK", {"target_layer_ids": [2, 1]}, "target_layer_ids"),
        ("DSPARK", {"target_layer_ids": "all"}, "target_layer_ids"),
        ("DSPARK", {"markov_head_type": "lstm"}, "markov_head_type"),
        ("DSPARK", {"markov_rank": 0}, "markov_rank"),
        ("DSPARK", {"mask_token_id": None}, "mask_token_id"),
        ("DSPARK", {"mask_token_id": VOCAB}, "mask_token_id"),
        ("DSPARK", {"block_size": 0}, "block_size"),
        ("DSPARK", {"block_size": "7"}, "block_size"),
        ("DSPARK", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ("DSPARK", {"architectures": []}, "architectures"),
        ("DSPARK", {"speculators_config": {}}, "speculators_config"),
        ("DFLASH", {"architectures": ["SomethingElse"]}, "architectures"),
        ("DFLASH", {"architectures": ["Qwen3DSparkModel"]}, "markov_rank"),
        ("DFLASH", {"markov_rank": 8, "markov_head_type": "vanilla"}, "markov_rank"),
        ("DFLASH", {"layer_types": ["full_attention"]}, "layer_types"),
        ("DFLASH", {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ("DFLASH", {"conv_kernel_size": 2}, "conv_group_size"),
        ("DFLASH", {"selector_rank": 8}, "selector_top_k"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(
    algorithm: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(DraftConfigError) as caught:
        _parse(algorithm, **change)
    assert caught.value.field == field
    assert all(word in str(caught.value) for word in (field, "expected", "found"))


@pytest.mark.parametrize("gamma", [0, -1, 5])
def test_gamma_beyond_the_trained_block_is_refused(gamma: int) -> None:
    with pytest.raises(DraftConfigError, match="gamma"):
        check_gamma(_parse("DSPARK", gamma=4), gamma)


def test_config_json_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DraftConfigError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DraftConfigError, match=r"config\.json"):
        read_config(tmp_path)


def _write(path: Path, config: DraftConfig, **change: tuple[int, ...] | None) -> None:
    shapes = required_tensors(config) | {k: v for k, v in change.items() if v}
    tensors = {n: torch.zeros(s) for n, s in shapes.items() if change.get(n, s) is not None}
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensor_names_with_and_without_prefix(prefix: str) -> None:
    assert canonical(f"{prefix}fc.weight") == "fc.weight"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"draft_vocab_size": 100},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False},
    ],
)
def test_a_whole_checkpoint_passes(tmp_path: Path, more: dict[str, Any]) -> None:
    config = _parse("DSPARK", **more)
    _write(tmp_path, config)
    found = read_headers(tmp_path)
    check_tensors(config, found)
    check_tensors(config, found | optional_tensors(config))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"fc.weight": None}, "fc.weight"),
        ({"surplus.weight": (3,)}, "surplus.weight"),
        ({"norm.weight": (HIDDEN + 1,)}, "norm.weight"),
        ({"markov_head.markov_w1.weight": (VOCAB, 7)}, "markov_head.markov_w1.weight"),
    ],
)
def test_missing_surplus_and_misshaped_tensors(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    config = _parse("DSPARK")
    _write(tmp_path, config, **change)
    with pytest.raises(DraftConfigError) as caught:
        check_tensors(config, read_headers(tmp_path))
    assert caught.value.field == name


def test_a_checkpoint_without_a_draft_is_told_apart(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(DraftConfigError, match="no draft in it"):
        check_tensors(_parse("DSPARK"), read_headers(tmp_path))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(tmp_path: Path, keep: int) -> None:
    config = _parse("DSPARK")
    _write(tmp_path, config)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DraftConfigError, match="Download the file again"):
        read_headers(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(DraftConfigError, match="weights"):
        read_headers(tmp_path)
