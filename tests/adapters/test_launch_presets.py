"""Every preset and everything emitted from it, against SGLang 0.5.23's own parser and resolution.

A preset whose flags SGLang refuses, resolves to other sizes than its name says, or spells in a
deprecated way fails here; so does a rule of the launcher that forbids what SGLang allows for a
shipped preset.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import FlagValue
from sglang_ext.launcher.compose import Launch, compose, flag_names, for_node
from sglang_ext.launcher.emit import to_bash, to_ray, to_slurm, to_yaml
from sglang_ext.launcher.kubernetes import to_kubernetes
from sglang_ext.launcher.paths import PREFIX
from sglang_ext.launcher.rules import require
from tests.unit.kubernetes_fields import FORMS, misfits

ROOT = Path(__file__).parents[2]
PRESETS = catalog.names("presets")
GPUS = [name for name in catalog.names("gpus") if name != "cpu"]

# There or not by which of SGLang's optional front ends the process has loaded.
OPTIONAL = {"metrics-host", "metrics-port", "servicer-impl"}


# Parts of no preset for a GPU: (model, machine, parts, flags).
COMPOSED: dict[str, tuple[str, str, str, dict[str, FlagValue]]] = {
    "halves and balance": (
        "deepseek-v3.2", "8xh200", "tp8 dp8 deepep tbo eplb-r32 fp8-kv metrics",
        {"max-running-requests": 64, "deepep-mode": "normal"},
    ),
    "prompts over eight": ("deepseek-v4-flash", "8xh200", "tp8 cp8-prefill pd-prefill", {}),
    "prompts over four": ("deepseek-v3.2", "8xh200", "tp8 dp2 cp4-prefill pd-prefill", {}),
    "decode half": (
        "deepseek-v3.2", "8xh200", "tp8 dp8 deepep pd-decode",
        {"max-running-requests": 64, "deepep-mode": "low_latency"},
    ),
    "prefill half in two stages": (
        "qwen3-8b", "8xh200", "tp4 pp2 pd-prefill dspark", {"max-running-requests": 8},
    ),
    "halves of a layer": (
        "deepseek-v3.2", "8xb200", "tp8 dp8 deepep sbo", {"max-running-requests": 64},
    ),
    "a block of sixteen": (
        "qwen3-8b", "8xh200", "tp1 replicas8 dflash", {"max-running-requests": 8},
    ),
    "four stages": ("qwen3-8b", "8xh200", "tp2 pp4", {}),
    "eight stages": ("qwen3-8b", "8xh200", "tp1 pp8 trust-remote-code", {}),
    "experts over four": ("qwen3-30b-a3b", "8xh200", "tp4 ep4 replicas2 fp8-kv", {}),
    "experts over two": ("qwen3-30b-a3b", "8xh200", "tp2 ep2 replicas4", {}),
    "sixteen replicas": ("qwen3-8b", "16xh200", "tp1 replicas16", {}),
    "thirty-two replicas": ("qwen3-8b", "32xh200", "tp1 replicas32", {}),
}  # fmt: skip


CHECKED = [*PRESETS, *COMPOSED]


def _preset(name: str) -> catalog.Preset:
    if name not in COMPOSED:
        return catalog.preset(name)
    model, machine, parts, flags = COMPOSED[name]
    return catalog.Preset(name, model, machine, "balanced", tuple(parts.split()), flags)


def _launch(name: str) -> Launch:
    composed = compose(_preset(name))
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
    choices = {o[2:]: a.choices for a in parser._actions for o in a.option_strings}
    for name, allowed in ours.choices.items():
        assert set(allowed) == set(choices[name]), name
    counts = {
        o[2:]
        for a in one
        if getattr(a.type, "__name__", "") == "human_readable_int"
        for o in a.option_strings
    }
    assert counts - set(ours.aliases) == set(ours.counts)
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


# What scripts read of their surroundings, as on the first of a launch's nodes.
SURROUNDINGS = {
    "NODE_RANK": "0",
    "SLURM_NODEID": "0",
    "LWS_WORKER_INDEX": "0",
    "DIST_INIT_ADDR": "10.0.0.1:20000",
    "LWS_LEADER_ADDRESS": "10.0.0.1",
    "SLURM_JOB_NODELIST": "10.0.0.1",
}


def _words_of_yaml(launch: Launch, folder: Path) -> list[str]:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    path = folder / "server.yaml"
    path.write_text(to_yaml(launch))
    parser, _ = _parser()
    return list(ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path)]))


def _words_of_script(text: str, launch: Launch, folder: Path) -> list[str]:
    """What `bash` itself hands to the server, python and Slurm's commands being replaced."""
    (folder / "python").write_text('#!/bin/bash\nprintf "%s\\0" "${@:3}"\n')
    (folder / "scontrol").write_text('#!/bin/bash\necho "$3"\n')
    (folder / "srun").write_text('#!/bin/bash\nexec "${@:2}"\n')
    for name in ("python", "scontrol", "srun"):
        (folder / name).chmod(0o755)
    env = {**os.environ, **SURROUNDINGS, "SLURM_NNODES": str(launch.hardware.nodes)}
    env |= {"PYTHON": str(folder / "python"), "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=env, check=True)
    return done.stdout.split("\0")[:-1]


def _words_of_kubernetes(text: str) -> list[str]:
    documents = list(yaml.safe_load_all(text))
    assert [found for d in documents for found in misfits(d, FORMS[d["kind"]])] == []
    group = documents[0]["spec"]["leaderWorkerTemplate"]
    pods = [group[f"{role}Template"]["spec"] for role in ("leader", "worker")]
    command, same = (pod["containers"][0]["command"] for pod in pods)
    assert command == same
    return [re.sub(r"\$\((\w+)\)", lambda m: SURROUNDINGS[m[1]], word) for word in command[3:]]


def _words_of_ray(text: str) -> list[str]:
    values = {
        node.targets[0].id: node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    arguments = values["ARGUMENTS"]
    assert isinstance(arguments, ast.Call)
    return list(json.loads(ast.literal_eval(arguments.args[0])))


@pytest.mark.parametrize("name", PRESETS)
def test_everything_emitted_is_the_same_command(name: str, tmp_path: Path) -> None:
    """As SGLang's parser reads it; where it listens is added, and by Ray the nodes."""
    parser, _ = _parser()
    composed, launch = compose(catalog.preset(name)), _launch(name)

    def read(words: list[str], *apart: str) -> dict[str, Any]:
        found = vars(parser.parse_args(words))
        return {key: value for key, value in found.items() if key not in apart}

    nodes = ("nnodes", "node_rank", "dist_init_addr")
    at = ("host", "port")
    same = launch.argv()
    assert read(_words_of_yaml(launch, tmp_path)) == read(same)
    for write in (to_bash, to_slurm):
        words = _words_of_script(write(composed), composed, tmp_path)
        apart = at if launch.hardware.nodes > 1 or write is to_bash else (*at, *nodes)
        assert read(words, *apart) == read(same, *apart), write.__name__
    served = [flag for flag, value in launch.flags.items() if str(value).startswith(PREFIX)]
    if not served:
        assert read(_words_of_kubernetes(to_kubernetes(composed)), *at) == read(same, *at)
    assert read(_words_of_ray(to_ray(composed)), *at, *nodes) == read(same, *at, *nodes)


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
    names = [n for n in CHECKED if catalog.hardware(_preset(n).hardware).gpu.name == gpu]
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
            "pp-size",
            "ep-size",
            "moe-a2a-backend",
            "deepep-mode",
            "kv-cache-dtype",
            "disaggregation-mode",
            "enable-two-batch-overlap",
            "enable-eplb",
            "ep-num-redundant-experts",
            "cp-strategy",
            "max-running-requests",
            "mem-fraction-static",
            "speculative-algorithm",
        ):
            if key in flags:
                assert found[key.replace("-", "_")] == flags[key], (name, key)
        assert found["device"] == "cuda"
        if found["speculative_algorithm"] == "DSPARK":
            gamma = catalog.model(_preset(name).model).drafts["dspark"].gamma
            assert found["speculative_num_draft_tokens"] == gamma + 1, name


def test_no_part_is_left_out() -> None:
    """Of those for a GPU; what a CPU runs is started by the end-to-end tests."""
    presets = [_preset(name) for name in CHECKED]
    on_gpus = [p for p in presets if not catalog.hardware(p.hardware).gpu.is_cpu]
    used = {part for preset in on_gpus for part in preset.parts}
    assert set(catalog.names("parts")) - used == {"cpu", "fp32"}


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
