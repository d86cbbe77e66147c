"""Every preset and everything emitted from it, against SGLang 0.5.23's own parser and resolution.

A preset whose flags SGLang refuses, resolves to other sizes than its name says, or spells in a
deprecated way fails here; so does a rule of the launcher that forbids what SGLang allows for a
shipped preset.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.launcher import catalog
from sglang_ext.launcher.compose import Launch, compose, flag_names, for_node
from sglang_ext.launcher.emit import to_yaml
from sglang_ext.launcher.rules import require

ROOT = Path(__file__).parents[2]
PRESETS = catalog.names("presets")
GPUS = [name for name in catalog.names("gpus") if name != "cpu"]

# There or not by which of SGLang's optional front ends the process has loaded.
OPTIONAL = {"metrics-host", "metrics-port", "servicer-impl"}


def _launch(name: str) -> Launch:
    composed = compose(catalog.preset(name))
    require(composed)
    nodes = composed.hardware.nodes
    return for_node(composed, nodes, 0, "10.0.0.1:20000" if nodes > 1 else None)


@cache
def _parser() -> tuple[argparse.ArgumentParser, type]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser, ServerArgs


def test_the_list_of_flags_is_sglangs() -> None:
    parser, _ = _parser()
    found: dict[str, set[str]] = {"switches": set(), "values": set(), "lists": set()}
    deprecated = set()
    for action in parser._actions:
        names = {o[2:] for o in action.option_strings if o.startswith("--")} - {"help"}
        if "Deprecated" in type(action).__name__:
            deprecated |= names
        elif action.nargs == 0:
            found["switches"] |= names
        elif action.nargs in ("*", "+") or isinstance(action.nargs, int):
            found["lists"] |= names
        else:
            found["values"] |= names
    ours = flag_names()
    known = {kind: set(getattr(ours, kind)) - OPTIONAL for kind in found}
    assert {kind: names - OPTIONAL for kind, names in found.items()} == known
    one = [a for a in parser._actions if a.nargs in (None, "*", "+") and a.dest != "help"]
    for kind, type_ in (("whole", int), ("decimal", float)):
        names = {o[2:] for a in one if a.type is type_ for o in a.option_strings if o[:2] == "--"}
        assert names - deprecated - OPTIONAL == set(getattr(ours, kind)), kind
    same = {o[2:]: a for a in parser._actions for o in a.option_strings}
    assert all(same[name] is same[first] for name, first in ours.aliases.items())
    assert deprecated <= set(ours.renamed)
    assert not set(ours.renamed) & ours.known


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_parsed_whole_and_without_deprecated_spellings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, server_args = _parser()
    launch = _launch(name)
    args = server_args.from_cli_args(parser.parse_args(launch.argv()))
    assert "deprecated" not in capsys.readouterr().err.lower()
    for flag, value in launch.effective().items():
        parsed = getattr(args, flag.replace("-", "_"), None)
        if not isinstance(value, str):
            assert parsed == value, flag


@pytest.mark.parametrize("name", PRESETS)
def test_emitted_yaml_is_the_same_command(name: str, tmp_path: Path) -> None:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, _ = _parser()
    launch = _launch(name)
    path = tmp_path / "server.yaml"
    path.write_text(to_yaml(launch))
    merged = ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path)])
    assert vars(parser.parse_args(merged)) == vars(parser.parse_args(launch.argv()))


def test_a_yaml_of_several_nodes_is_joined_by_the_words_of_its_header(tmp_path: Path) -> None:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, _ = _parser()
    launch = compose(catalog.preset("deepseek-v3.2-2x8xh200-low-latency"))
    path = tmp_path / "server.yaml"
    path.write_text(to_yaml(launch))
    words = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "h:1"]
    merged = ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path), *words])
    same = for_node(launch, 2, 1, "h:1").argv()
    assert vars(parser.parse_args(merged)) == vars(parser.parse_args(same))


def test_text_that_looks_like_a_number_reaches_sglang_as_written(tmp_path: Path) -> None:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, _ = _parser()
    given = {"api_key": "0123456", "revision": "12345e67", "served_model_name": "true"}
    lists: dict[str, list[Any]] = {
        "cuda_graph_bs_decode": [1, 2, 4],
        "lora_target_modules": ["all"],
    }
    settings = [f"{name}={value}" for name, value in given.items()]
    settings += [f"{name}={' '.join(map(str, values))}" for name, values in lists.items()]
    launch = compose(catalog.preset("demo-cpu-balanced"), settings)
    path = tmp_path / "server.yaml"
    path.write_text(to_yaml(launch))
    merged = ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path)])
    for words in (launch.argv(), merged):
        assert (given | lists).items() <= vars(parser.parse_args(words)).items()


def _checkpoints(folder: Path) -> dict[str, str]:
    """Directories with the config.json of every model and draft, by the path that launches use."""
    places: dict[str, str] = {}
    for name in catalog.names("base"):
        model = catalog.model(name)
        wanted = {model.path: model.config}
        wanted |= {d.path: d.config for d in model.drafts.values() if d.path}
        for path, config in wanted.items():
            directory = folder / path.replace("/", "--").replace(":", "-")
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(config))
            places[path] = str(directory)
    return places


def _resolve_all(gpu: str, folder: Path) -> dict[str, Any]:
    places = _checkpoints(folder)
    facts = catalog.gpu(gpu)
    names = [n for n in PRESETS if catalog.hardware(catalog.preset(n).hardware).gpu.name == gpu]
    launches = []
    for name in names:
        launch = _launch(name)
        argv = [places.get(word, word) for word in launch.argv()]
        launches.append({"name": name, "argv": argv, "env": launch.env})
    orders = folder / "orders.json"
    shown = {"name": facts.name, "capability": facts.capability, "memory": facts.memory}
    orders.write_text(json.dumps({"gpu": shown, "launches": launches}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.preset_world", str(orders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("gpu", GPUS)
def test_sglang_resolves_every_preset_to_what_it_says(gpu: str, tmp_path: Path) -> None:
    resolved = _resolve_all(gpu, tmp_path)
    assert resolved
    errors = {name: found["error"] for name, found in resolved.items() if "error" in found}
    assert not errors, "\n".join(f"{n}: {e[:600]}" for n, e in errors.items())
    for name, found in resolved.items():
        flags = _launch(name).effective()
        for key in (
            "tp-size",
            "dp-size",
            "attn-dp-size",
            "attn-cp-size",
            "ep-size",
            "moe-a2a-backend",
            "max-running-requests",
            "mem-fraction-static",
            "speculative-algorithm",
        ):
            if key in flags:
                assert found[key.replace("-", "_")] == flags[key], (name, key)
        assert found["device"] == "cuda"
        if found["speculative_algorithm"] == "DSPARK":
            gamma = catalog.model(catalog.preset(name).model).drafts["dspark"].gamma
            assert found["speculative_num_draft_tokens"] == gamma + 1, name


def test_a_launch_that_sglang_refuses_is_seen_to_be_refused(tmp_path: Path) -> None:
    """The resolution used above does refuse: without this, it might accept anything."""
    places = _checkpoints(tmp_path)
    v4 = places[catalog.model("deepseek-v4-flash").path]
    base = ["--model-path", v4, "--tp-size", "8"]
    orders = tmp_path / "orders.json"
    bad = {
        "deepep": [
            *base,
            "--attn-dp-size",
            "8",
            "--enable-dp-lm-head",
            "--moe-a2a-backend",
            "deepep",
            "--speculative-algorithm",
            "DSPARK",
        ],
        "zigzag": [*base, "--attn-cp-size", "8", "--enable-prefill-cp", "--cp-strategy", "zigzag"],
        "dflash": [
            *base,
            "--speculative-algorithm",
            "DFLASH",
            "--speculative-draft-model-path",
            v4,
        ],
        "both": [*base, "--attn-dp-size", "8", "--dp-size", "2"],
        "single-batch overlap": [
            *base,
            "--attn-dp-size",
            "8",
            "--moe-a2a-backend",
            "deepep",
            "--enable-single-batch-overlap",
        ],
    }
    launches = [{"name": n, "argv": argv, "env": {}} for n, argv in bad.items()]
    gpu = {"name": "h200", "capability": [9, 0], "memory": 150.1e9}
    orders.write_text(json.dumps({"gpu": gpu, "launches": launches}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.preset_world", str(orders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    found = json.loads(done.stdout)
    assert all("error" in found[name] for name in bad), found
    # Said by a rank, after the launcher has accepted.
    assert "SBO" in found["single-batch overlap"]["error"]


def test_yaml_files_are_plain_data() -> None:
    for path in sorted(catalog.ROOT.rglob("*.yaml")):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
