"""What cannot be served ends before the port opens, with field, expected, found and remedy."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.servers import Spec, group_is_gone, speculation
from tests.e2e.stand import COMMON, Stand
from tests.tiny import MASK

pytestmark = pytest.mark.e2e

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def _set(**fields: Any) -> Change:
    def change(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        config.update(fields)

    return change


def _without(tensor: str) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[tensor]

    return change


def _reshaped(tensor: str, *shape: int) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor] = torch.zeros(shape)

    return change


# name: (algorithm, what is wrong with the draft, words that the message must hold)
BROKEN: dict[str, tuple[str, Change, Sequence[str]]] = {
    "hidden size": ("DSPARK", _set(hidden_size=96), ("hidden_size", "64", "96")),
    "vocabulary": ("DSPARK", _set(vocab_size=300), ("vocab_size", "264", "300")),
    "target depth": ("DFLASH", _set(num_target_layers=9), ("num_target_layers", "4", "9")),
    "layer ids": ("DSPARK", _set(target_layer_ids=[0, 1, 7]), ("target_layer_ids", "0 to 2", "7")),
    "last layer": (
        "DFLASH",
        _set(dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 3]}),
        ("target_layer_ids", "0 to 2", "3"),
    ),
    "layer ids of another width": (
        "DSPARK",
        _set(target_layer_ids=[0, 2]),
        ("fc.weight", "[64, 128]", "[64, 192]"),
    ),
    "rope": ("DSPARK", _set(rope_theta=5e5), ("rope_theta", "10000", "500000")),
    "head": ("DSPARK", _set(markov_head_type="lstm"), ("markov_head_type", "vanilla", "lstm")),
    "mask token": ("DSPARK", _set(mask_token_id=264), ("mask_token_id", "264")),
    "speculators format": ("DFLASH", _set(speculators_version="0.2"), ("speculators",)),
    "architecture": ("DFLASH", _set(architectures=["SomeDraft"]), ("architectures", "SomeDraft")),
    "missing tensor": ("DSPARK", _without("fc.weight"), ("fc.weight", "no such tensor")),
    "misshaped tensor": (
        "DFLASH",
        _reshaped("layers.1.mlp.up_proj.weight", 81, 64),
        ("layers.1.mlp.up_proj.weight", "[80, 64]", "[81, 64]"),
    ),
    "surplus tensor": (
        "DFLASH",
        _reshaped("markov_head.markov_w1.weight", 264, 8),
        ("markov_head.markov_w1.weight",),
    ),
}


def _copy(source: Path, path: Path, change: Change) -> Path:
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def _refused(stand: Stand, words: Sequence[str], *flags: object) -> None:
    """Launch with `flags` and hold the refusal to what every refusal must have."""
    target = stand.checkpoints.target("llama")
    code, log, pid = stand.pool.launch_and_wait(
        Spec.of("--model-path", target, *COMMON, *flags), seconds=120
    )
    assert code is not None, f"still running:\n{log[-3000:]}"
    assert code != 0
    # The last line is the error that ended it.
    message = log.strip()[-2500:]
    for word in (*words, "expected", "found"):
        assert word in message, message
    assert "Uvicorn running" not in log
    assert group_is_gone(pid)


@pytest.mark.parametrize("name", BROKEN)
def test_draft_that_does_not_fit(stand: Stand, name: str, tmp_path: Path) -> None:
    algorithm, change, words = BROKEN[name]
    kind = {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm]
    draft = _copy(stand.checkpoints.draft(algorithm, kind), tmp_path / "draft", change)
    _refused(stand, words, *speculation(algorithm, draft))


def test_missing_folder(stand: Stand, tmp_path: Path) -> None:
    _refused(stand, ("draft",), *speculation("DSPARK", tmp_path / "nothing"))


def test_missing_config(stand: Stand, tmp_path: Path) -> None:
    _refused(stand, ("config.json",), *speculation("DSPARK", tmp_path))


def test_no_draft_given(stand: Stand) -> None:
    words = ("--speculative-draft-model-path",)
    _refused(stand, words, "--speculative-algorithm", "DSPARK")


def test_target_given_as_draft(stand: Stand) -> None:
    target = stand.checkpoints.target("llama")
    _refused(stand, ("markov_rank",), *speculation("DSPARK", target))


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_truncated_weights(stand: Stand, cut: int, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(stand.checkpoints.dspark(), draft)
    weights = draft / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:cut])
    _refused(stand, ("model.safetensors", "Download"), *speculation("DSPARK", draft))


@pytest.mark.parametrize(("algorithm", "draft_of"), [("DSPARK", "DFLASH"), ("DFLASH", "DSPARK")])
def test_draft_of_the_other_algorithm(stand: Stand, algorithm: str, draft_of: str) -> None:
    kind = {"DSPARK": "vanilla", "DFLASH": "zlab"}[draft_of]
    draft = stand.checkpoints.draft(draft_of, kind)
    words = ("markov_rank", f"--speculative-algorithm {draft_of}")
    _refused(stand, words, *speculation(algorithm, draft))


@pytest.mark.parametrize("rows", [0, 1, 10, 17])
def test_gamma_out_of_range(stand: Stand, rows: int) -> None:
    flags = ("--speculative-num-draft-tokens", rows)
    _refused(stand, ("gamma",), *speculation("DSPARK", stand.checkpoints.dspark()), *flags)


def test_two_values_of_gamma(stand: Stand) -> None:
    flags = ("--speculative-num-draft-tokens", 5, "--speculative-dspark-block-size", 5)
    words = ("--speculative-dspark-block-size", "--speculative-num-draft-tokens")
    _refused(stand, words, *speculation("DSPARK", stand.checkpoints.dspark()), *flags)


@pytest.mark.parametrize(
    ("flag", "content"),
    [
        ("--speculative-dspark-sps-table-path", None),
        ("--speculative-dspark-sps-table-path", "not json"),
        ("--speculative-dspark-sps-table-path", '{"sample_batch_tokens": [1, 2]}'),
        (
            "--speculative-dspark-sps-table-path",
            '{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [9], "max_batch_tokens": 2}',
        ),
        ("--speculative-dspark-confidence-sts-path", None),
        ("--speculative-dspark-confidence-sts-path", "[]"),
        ("--speculative-dspark-confidence-sts-path", '{"temperatures": [1.0, -2.0]}'),
        ("--speculative-dspark-confidence-sts-path", '{"temperatures": [1.0, 1.0]}'),
    ],
)
def test_tables(stand: Stand, flag: str, content: str | None, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    if content is not None:
        table.write_text(content)
    draft = stand.checkpoints.dspark()
    _refused(stand, (), *speculation("DSPARK", draft), flag, table)


@pytest.mark.parametrize(
    "flags",
    [("--pp-size", 2), ("--speculative-draft-window-size", 64), ("--enable-hierarchical-cache",)],
)
def test_flags_that_cannot_be_honoured(stand: Stand, flags: tuple[object, ...]) -> None:
    draft = stand.checkpoints.dspark()
    _refused(stand, (str(flags[0]),), *speculation("DSPARK", draft), *flags)


def test_recurrent_target(stand: Stand, tmp_path: Path) -> None:
    """Rejected drafts would stay in the state of its linear attention."""
    shutil.copytree(stand.checkpoints.target("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model-path", tmp_path)
    words = ("recurrent", "Qwen3NextForCausalLM", "--speculative-algorithm")
    _refused(stand, words, *speculation("DSPARK", stand.checkpoints.dspark()), *flags)


def test_environment_variable(stand: Stand) -> None:
    target, draft = stand.checkpoints.target("llama"), stand.checkpoints.dspark()
    spec = Spec.of(
        "--model-path",
        target,
        *COMMON,
        *speculation("DSPARK", draft),
        env={"SGLANG_EXT_SCHEDULER": "sometimes"},
    )
    code, log, pid = stand.pool.launch_and_wait(spec, seconds=120)
    assert code not in (0, None)
    assert "SGLANG_EXT_SCHEDULER" in log
    assert "sometimes" in log
    assert group_is_gone(pid)


@pytest.mark.parametrize(
    "params", [{"speculative": "no"}, {"gamma": -1}, {"gamma": 2.5}, {"gamma": True}]
)
def test_option_of_a_request(stand: Stand, params: dict[str, Any]) -> None:
    """A request that asks for what cannot be gets an error; the server goes on."""
    from tests.e2e.client import Refused, greedy

    client = stand.speculative("DSPARK")
    with pytest.raises(Refused, match="custom_params"):
        client.generate([1, 2, 3], greedy(4, custom_params=params))
    assert client.generate([1, 2, 3], greedy(4)).ids


def test_port_is_free_again(stand: Stand, tmp_path: Path) -> None:
    """The port of a refused launch was never taken."""
    port = stand.pool.next_port()
    target = stand.checkpoints.target("llama")
    flags = (*speculation("DSPARK", tmp_path), "--port", port)
    stand.pool.launch_and_wait(Spec.of("--model-path", target, *COMMON, *flags))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
