"""The command line of launch and plan: golden output, emitted files, mistakes."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sglang_ext import child
from sglang_ext.cli import app
from sglang_ext.launcher import catalog
from sglang_ext.launcher.compose import compose
from sglang_ext.launcher.diagnose import explain
from sglang_ext.launcher.emit import WRITERS
from sglang_ext.launcher.kubernetes import k8s_name
from sglang_ext.launcher.surroundings import url

runner = CliRunner()
TWO_NODES = "deepseek-v3.2-2x8xh200-low-latency"


def run(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_dry_run_prints_the_command_and_where_it_comes_from(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        "model: deepseek-v3.2\nhardware: 8xh200\npoint: balanced\nparts: [tp8, dp8, ep8, deepep]\n"
        "flags: {max-running-requests: 64}\nenv: {NCCL_DEBUG: WARN}\n"
        "status: neither\nsource: a test\n"
    )
    assert run("launch", str(preset), "--dry-run", "--set", "port=31000") == (
        "NCCL_DEBUG=WARN \\\n"
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3.2 --tp-size 8 "
        "--attn-dp-size 8 --enable-dp-lm-head --ep-size 8 --moe-a2a-backend deepep "
        "--deepep-mode auto --max-running-requests 64 --port 31000\n"
        "# neither: a test\n"
    )


def test_a_flag_of_several_values_takes_them_apart() -> None:
    words = ("launch", "demo-cpu-balanced", "--set", "cuda-graph-bs-decode=1 2 4")
    assert " --cuda-graph-bs-decode 1 2 4 --" in run(*words, "--dry-run")
    assert "\n  --cuda-graph-bs-decode 1 2 4 \\\n" in run(*words, "--emit", "bash")
    workers, _ = yaml.safe_load_all(
        run("launch", TWO_NODES, "--emit", "k8s-lws", *words[2:])
    )  # fmt: skip
    pod = workers["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    command = pod["containers"][0]["command"]
    at = command.index("--cuda-graph-bs-decode")
    assert command[at + 1 : at + 4] == ["1", "2", "4"]


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "lora-paths='/a b' /c"),
        ("--", "--lora-paths", "/a b", "/c"),
    ],
)
def test_a_value_with_a_space_stays_one(words: tuple[str, ...]) -> None:
    shown = json.loads(run("launch", "demo-cpu-balanced", "--dry-run", "--json", *words))
    at = shown["argv"].index("--lora-paths")
    assert shown["argv"][at + 1 : at + 3] == ["/a b", "/c"]
    written = yaml.safe_load(run("launch", "demo-cpu-balanced", "--emit", "yaml", *words))
    assert written["lora-paths"] == ["/a b", "/c"]


def test_json_among_the_values_of_a_flag_needs_no_quotes_of_its_own() -> None:
    adapter = '{"lora_name": "a", "lora_path": "/x y"}'
    words = ("launch", "demo-cpu-balanced", "--set", f"lora-paths={adapter}", "--emit", "yaml")
    assert yaml.safe_load(run(*words))["lora-paths"] == [adapter]


def test_extra_words_are_passed_on_and_win() -> None:
    shown = json.loads(
        run("launch", "demo-cpu-balanced", "--dry-run", "--json", "--", "--dtype", "float32")
    )
    assert shown["argv"][-2:] == ["--dtype", "float32"]


def test_list_as_json_has_every_preset_with_its_status() -> None:
    rows = json.loads(run("launch", "--list", "--json"))
    assert [row["name"] for row in rows] == catalog.names("presets")
    for row in rows:
        assert row["status"] in catalog.STATUSES
        assert row["source"]
        assert row["status"] != "run-on-this-hardware" or row["hardware"] == "cpu"
    assert "demo-cpu-low-latency" in run("launch", "--list")


@pytest.mark.parametrize(
    ("words", "named", "hint"),
    [
        (("launch", "demo-cpu-lowlatency"), "preset", "demo-cpu-low-latency"),
        (("launch", "zzzz"), "preset", "'zzzz'. `sglang-ext launch --list` shows them."),
        (("launch", "qwen3-8b-2x8xh100-balanced"), "preset",
         "start qwen3-8b-8xh100-balanced on each of the 2"),
        (("launch", "deepseek-v4-pro-8xh100-low-latency"), "preset", "No request fits: weights ta"),
        (("launch", "deepseek-v3.2-8xa100-balanced"), "preset", "which a100 cannot multiply"),
        (("launch", "qwen3-8b-cpu-balanced"), "preset", "that of launch/gpus/cpu.yaml"),
        (("launch", "demo-8xh100-balanced"), "preset", "use demo-cpu-balanced"),
        (("launch", "qwen3-8b-4xh100-balanced"), "preset", "`sglang-ext plan --model qwen3-8b "
         "--hardware 4xh100 --objective balanced --preset it.yaml`"),
        (("launch", "qwen3-8b-8xh1000-balanced"), "preset", "Did you mean qwen3-8b-8xh"),
        (("launch", "demo-cpu-balanced", "--set", "max-runing-requests=3"), "flag",
         "max-running-requests"),
        (("launch", "demo-cpu-balanced", "--", "--enable-dp-attention"), "spelling",
         "--attn-dp-size"),
        (("launch", "demo-cpu-balanced", "--", "--cp", "2"), "spelling", "--attn-cp-size"),
        (("launch", "demo-cpu-balanced", "--emit", "slrum"), "--emit", "slurm"),
        (("launch", "demo-cpu-balanced", "--set", "port"), "--set", "FLAG=VALUE"),
        (("launch",), "PRESET", "--list"),
        (("launch", TWO_NODES), "--nnodes", "Start it on 2 nodes"),
        (("launch", "demo-cpu-balanced", "--set", "max-running-requests=many"), "whole number",
         "--max-running-requests"),
        *((("launch", TWO_NODES, "--dry-run", *words), f"--{flag}", f"PRESET --{flag}")
          for flag, words in (("nnodes", ("--set", "nnodes=2")),
                              ("node-rank", ("--", "--node-rank", "1")),
                              ("dist-init-addr", ("--", "--nccl-init-addr", "a:1")))),
        (("launch", "demo-cpu-balanced", "--dry-run", "--set", "nnodes=2"), "--nnodes",
         "an option of the command"),
        (("launch", TWO_NODES, "--nnodes", "2", "--dist-init-addr", "a b:5", "--dry-run"),
         "--dist-init-addr", "HOST:PORT"),
        *((("launch", "demo-cpu-balanced", "--dry-run", "--set", f"{flag}={value}"), f"--{flag}",
           f"Correct --{flag}.")
          for flag, value in (("context-length", "-5"), ("max-total-tokens", "-1"),
                              ("max-total-tokens", "0"), ("chunked-prefill-size", "0"),
                              ("chunked-prefill-size", "-2"), ("dtype", "foo"))),
        (("launch", "demo-cpu-balanced", "--dry-run", "--set", "host=a b"), "--host",
         "a name or an address"),
        (("launch", "demo-cpu-balanced", "--dry-run", "--", "--host", "a:b"), "--host",
         "a name or an address"),
        (("launch", "demo-cpu-balanced", "--set", "host=203.0.113.7"), "--host",
         "an address of this machine"),
        (("plan", "--model", "qwen3-8", "--hardware", "8xh100"), "model", "qwen3-8b"),
        (("plan", "--model", "qwen3-8b", "--hardware", "8xh1000"), "GPU", "h100"),
        (("plan", "--model", "qwen3-8b", "--hardware", "h100"), "--gpus", "8xh100"),
        (("plan", "--model", "qwen3-8b", "--hardware", "h100", "--gpus", "12"), "--gpus",
         "multiple of 8"),
        (("plan", "--model", "qwen3-8b", "--hardware", "8xh100", "--objective", "balance"),
         "--objective", "balanced"),
        (("plan", "--model", "qwen3-8b", "--hardware", "8xh100", "--task", "maths"), "--task",
         "math"),
        (("plan", "--model", "deepseek-v4-pro", "--hardware", "8xh100"), "memory",
         "weights take"),
        (("plan", "--model", "qwen3-32b", "--hardware", "1xh100", "--concurrency", "512"),
         "memory", "At this concurrency"),
        (("plan", "--model", "qwen3-8b", "--hardware", "8xh100", "--input-tokens", "90000"),
         "--input-tokens", "40960"),
        (("plan", "--model", "deepseek-v3.2", "--hardware", "8xa100"), "memory", "fp8"),
        (("plan", "--model", "qwen3-8b", "--hardware", "1xh100", "--rate", "1e6"), "--rate",
         "at most"),
        (("plan", "--model", "qwen3-8b", "--hardware", "3xh100"), "power of two",
         "Plan for 2xh100 or 4xh100"),
        (("plan", "--model", "qwen3-8b", "--hardware", "3x8xh100"), "power of two",
         "Plan for 2x8xh100 or 4x8xh100"),
        (("plan", "--model", "qwen3-8b", "--hardware", "64x8xh100"), "power of two",
         "Plan for 32x8xh100;"),
        (("plan", "--table", "mpt"), "--table", "mtp"),
        (("plan", "--hardware", "8xh100"), "--model", "qwen3-8b"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_remedy_and_code_2(
    words: tuple[str, ...], named: str, hint: str
) -> None:
    output = run(*words, code=2)
    assert named in output
    assert hint in output


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model: qwen3-8b\n", "hardware"),
        ("- a\n", "mapping"),
        ("a: [\n", "file"),
        ("model: qwen3-8b\nhardware: 8xh100\npoint: fast\nparts: []\nstatus: neither\nsource: x\n",
         "point"),
        ("model: qwen3-8b\nhardware: 8xh100\npoint: balanced\nparts: [tp9]\nstatus: neither\n"
         "source: x\n", "part"),
        ("model: qwen3-8b\nhardwear: 8xh100\n", "hardware"),
        ("model: qwen3-8b\nhardware: 8xh100\npoint: balanced\nparts: []\nstatus: neither\n"
         "source: x\nflags: {tp_size: 8}\n", "tp_size"),
        ("model: qwen3-8b\nhardware: 8xh100\npoint: balanced\nparts: []\nstatus: neither\n"
         "source: x\nenv: {A: 1}\n", "env.A"),
        *((f"model: qwen3-8b\nhardware: 8xh100\npoint: balanced\nparts: []\nstatus: neither\n"
           f"source: x\n{field.partition('.')[0]}: {{{entry}}}\n", field)
          for field, entry in (("env", '"A;rm -rf /": "x"'), ("env", '"": "x"'), ("env", '1: "x"'),
                               ("env", '"A\\n": "x"'), ("env.A", 'A: "x\\0"'), ("flags", "1: 8"))),
    ],
)  # fmt: skip
def test_a_damaged_preset_is_refused_by_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert field in run("launch", str(path), "--dry-run", code=2)


@pytest.mark.parametrize("name", ["demo-cpu-balanced", TWO_NODES])
@pytest.mark.parametrize("kind", ["bash", "slurm"])
def test_scripts_are_bash_and_carry_every_flag(name: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(run("launch", name, "--emit", kind, "--set", "served-model-name=it's"))
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    flags = catalog.preset(name).flags
    assert all(f"--{flag}" in script.read_text() for flag in flags)


def test_a_bash_script_runs_the_same_words(tmp_path: Path) -> None:
    """The script, with a `python3` that prints its arguments, against the dry run."""
    script, fake = tmp_path / "run.sh", tmp_path / "python3"
    script.write_text(run("launch", TWO_NODES, "--emit", "bash", "--set", "served-model-name=a b"))
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    env = {"PYTHON": str(fake), "NODE_RANK": "1", "DIST_INIT_ADDR": "h:1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env)
    shown = json.loads(
        run("launch", TWO_NODES, "--dry-run", "--json", "--set", "served-model-name=a b",
            "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "h:1")
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert words[2:-4] == shown["argv"]


@pytest.mark.parametrize("name", ["qwen3-8b-8xh100-balanced", TWO_NODES])
def test_kubernetes_manifest_has_the_shape_of_a_leader_worker_set(name: str) -> None:
    documents = list(yaml.safe_load_all(run("launch", name, "--emit", "k8s-lws")))
    workers, service = documents
    nodes = catalog.hardware(catalog.preset(name).hardware).nodes
    assert workers["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert workers["kind"] == "LeaderWorkerSet"
    assert set(workers) == {"apiVersion", "kind", "metadata", "spec"}
    template = workers["spec"]["leaderWorkerTemplate"]
    assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert template["size"] == nodes
    for role in ("leader", "worker"):
        _assert_pod(template[f"{role}Template"], nodes)
    # LeaderWorkerSet's own Service has the set's name.
    assert service["metadata"]["name"] == f"{workers['metadata']['name']}-leader"
    selector = service["spec"]["selector"]
    assert selector.items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not selector.items() <= template["workerTemplate"]["metadata"]["labels"].items()


def _assert_pod(template: dict[str, Any], nodes: int) -> None:
    (container,) = template["spec"]["containers"]
    assert set(container) >= {"name", "image", "command", "resources", "volumeMounts"}
    assert all(isinstance(word, str) for word in container["command"])
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    many = nodes > 1
    assert ("$(LWS_WORKER_INDEX)" in container["command"]) == many
    assert container["resources"]["limits"].get("rdma/ib") == ("1" if many else None)
    pinned = {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container.get("securityContext") == (pinned if many else None)
    env = {entry["name"]: entry for entry in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["models"] == env["HF_HOME"]["value"]
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("8b", "sglang-8b"),
        ("___", "sglang"),
        ("Mine_1.x", "mine-1-x"),
        ("a" * 47 + "-b", "a" * 47),
        ("é", "sglang"),
    ],
)
def test_a_kubernetes_name_is_a_label_that_leaves_room(name: str, label: str) -> None:
    assert k8s_name(name) == label


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("yaml", ("port: 31000", "host: 10.0.0.7")),
        ("bash", ('--host "${SGLANG_HOST:-10.0.0.7}" --port "${SGLANG_PORT:-31000}"',)),
        ("slurm", ('--host "${SGLANG_HOST:-10.0.0.7}" --port "${SGLANG_PORT:-31000}"',)),
        ("ray", ('"SGLANG_HOST", "10.0.0.7"', '"SGLANG_PORT", "31000"')),
        ("k8s-lws", ("- 10.0.0.7", "- '31000'", "containerPort: 31000", "port: 31000",
                     "targetPort: 31000")),
    ],
)  # fmt: skip
def test_an_emitted_file_listens_where_the_user_said(kind: str, lines: tuple[str, ...]) -> None:
    text = run("launch", TWO_NODES, "--emit", kind, "--set", "port=31000", "--set", "host=10.0.0.7")
    assert all(line in text for line in lines), text
    assert "30000" not in text
    assert "0.0.0.0" not in text


def test_settings_win_over_the_manifests_own_environment() -> None:
    text = run("launch", TWO_NODES, "--emit", "k8s-lws", "--set", "HF_HOME=/x", "--set",
               "HF_TOKEN=y")  # fmt: skip
    workers, _ = yaml.safe_load_all(text)
    pod = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    assert container["env"][:2] == [
        {"name": "HF_HOME", "value": "/x"}, {"name": "HF_TOKEN", "value": "y"},
    ]  # fmt: skip
    assert {"name": "models", "mountPath": "/x"} in container["volumeMounts"]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("words", "flag", "remedy"),
    [
        (("--", "--port", "31000"), "--port", "Use --set port=31000."),
        (("--", "--host=h"), "--host", "Use --set host=h."),
        (("--", "--nnodes", "2"), "--nnodes", "Leave it out"),
        (("--", "--node-rank", "1"), "--node-rank", "Leave it out"),
        (("--", "--nccl-init-addr", "h:1"), "--dist-init-addr", "Leave it out"),
        (("--set", "nnodes=2"), "--nnodes", "Leave it out"),
        (("--nnodes", "2"), "--nnodes", "Leave it out"),
        (("--node-rank", "0"), "--node-rank", "Leave it out"),
        (("--dist-init-addr", "h:1"), "--dist-init-addr", "Leave it out"),
    ],
)
def test_what_a_file_has_no_place_for_is_refused(
    kind: str, words: tuple[str, ...], flag: str, remedy: str
) -> None:
    said = run("launch", TWO_NODES, "--emit", kind, *words, code=2)
    assert flag in said
    assert remedy in said


@pytest.mark.parametrize(
    ("kind", "name", "setting", "said"),
    [
        ("bash", TWO_NODES, "host=$(id)", "a name or an address"),
        ("k8s-lws", TWO_NODES, "host=127.0.0.1", "other pods"),
        ("k8s-lws", "demo-cpu-balanced", "port=31000", "a model that a pod can fetch"),
        ("k8s-lws", TWO_NODES, "model-path=demo:target", "a model that a pod can fetch"),
    ],
)
def test_what_a_file_could_not_serve_is_refused(
    kind: str, name: str, setting: str, said: str
) -> None:
    assert said in run("launch", name, "--emit", kind, "--set", setting, code=2)


@pytest.mark.parametrize(
    ("words", "useless"),
    [
        ("--list", "--set port=1 / --dry-run / --emit yaml / --nnodes 1 / --ready-seconds 9"),
        ("demo-cpu-balanced --emit yaml", "--dry-run / --json / --ready-seconds 9"),
        ("demo-cpu-balanced --dry-run", "--ready-seconds 9"),
        ("demo-cpu-balanced", "--json"),
    ],
)
def test_an_option_without_effect_is_refused(words: str, useless: str) -> None:
    for option in useless.split(" / "):
        said = run("launch", *words.split(), *option.split(), code=2)
        assert said.startswith(f"error: {option.split()[0]}: expected none "), said
        assert "where it has no effect" in said
    assert "no preset beside it" in run("launch", "demo-cpu-balanced", "--list", code=2)


@pytest.mark.parametrize("name", ["demo-cpu-balanced", TWO_NODES])
def test_only_gpus_that_are_there_are_asked_for(name: str) -> None:
    slurm, ray = (run("launch", name, "--emit", kind) for kind in ("slurm", "ray"))
    on_gpus = name == TWO_NODES
    assert ("#SBATCH --gpus-per-node=8\n" in slurm) == ("gpus" in slurm) == on_gpus
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in slurm
    assert f"GPUS = {8 if on_gpus else 0}\n" in ray
    (bundle,) = (line for line in ray.splitlines() if line.startswith("BUNDLE = "))
    scope: dict[str, Any] = {"GPUS": 8 if on_gpus else 0}
    exec(bundle, scope)
    assert scope["BUNDLE"] == ({"GPU": 8, "CPU": 1} if on_gpus else {"CPU": 1})


def test_the_yaml_of_several_nodes_says_how_they_are_joined() -> None:
    many = run("launch", TWO_NODES, "--emit", "yaml").splitlines()[0]
    assert many.endswith("--config FILE --nnodes 2 --node-rank R --dist-init-addr HOST:PORT")
    assert run("launch", "demo-cpu-balanced", "--emit", "yaml").splitlines()[0].endswith("FILE")


def test_ray_script_is_python_with_the_launchs_arguments() -> None:
    tree = ast.parse(run("launch", TWO_NODES, "--emit", "ray"))
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(assigned["NODES"]) == 2
    arguments = assigned["ARGUMENTS"]
    assert isinstance(arguments, ast.Call)
    words = json.loads(ast.literal_eval(arguments.args[0]))
    assert words[:2] == ["--model-path", "deepseek-ai/DeepSeek-V3.2"]


LOGS = {
    "port in use": "OSError: [Errno 98] error while attempting to bind: address already in use",
    "wrong flag": "sglang serve: error: argument --tp-size/--tp: invalid int value: 'x'",
    "no draft": "ValueError: DSpark dense speculative decoding requires setting "
    "--speculative-draft-model-path.",
    "dispatch limit": "AssertionError: x.size(0) <= num_max_dispatch_tokens_per_rank",
    "out of GPU memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "not enough memory for the KV cache": "RuntimeError: Not enough memory. Please try to "
    "increase --mem-fraction-static.",
    "checkpoint missing": "OSError: x is not a local folder and is not a valid model identifier",
    "no room on a disk": "OSError: [Errno 28] No space left on device",
    "checkpoint not open to you": "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
    "no permission": "PermissionError: [Errno 13] Permission denied: '/models/x'",
    "other ranks unreachable": "torch.distributed.DistStoreError: Timed out after 601 seconds "
    "waiting for clients. 1/2 clients joined.",
    "process killed": "rank TP1 (pid 7) has died, killed by SIGKILL: the server ends",
    "refused by SGLang": "ValueError: DeepSeek V3.2 prefill CP does not support zigzag",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_explained(name: str) -> None:
    log = f"INFO loading\n{LOGS[name]}\nshutting down\n"
    cause = explain(log)
    assert cause is not None
    assert cause.name == name
    assert cause.evidence == LOGS[name]
    assert cause.remedy


@pytest.mark.parametrize(
    ("word", "name"), [("exit code: -9", "process killed"), ("exit code: 1", "refused by SGLang")]
)
def test_a_killed_rank_explains_more_than_the_peers_it_leaves(word: str, name: str) -> None:
    """SGLang speaks of SIGKILL whatever the code was."""
    peers = "torch.distributed.DistNetworkError: Connection closed by peer\n"
    refused = "ValueError: chunked_prefill_size must be positive\n"
    died = f"RuntimeError: Rank 0 scheduler died ({word}). If exit code is -9 (SIGKILL), a common\n"
    cause = explain((peers if name == "process killed" else refused) + died)
    assert cause is not None
    assert cause.name == name


HEALTHY = """\
ImportError: libcuda.so.1: cannot open shared object file: No such file or directory
[2026-11-30 17:18:29] server_args=ServerArgs(speculative_draft_model_path=None)
[2026-11-30 17:18:30 TP0] Load weight begin. avail mem=1
Couldn't connect to 'https://huggingface.co', using the cache
[2026-11-30 17:18:31 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 64
[2026-11-30 17:18:31 TP0] max_total_num_tokens=64, chunked_prefill_size=4096
[2026-11-30 17:18:32] The server is fired up and ready to roll!
"""
RAISED = """\
[2026-11-30 17:18:33 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "x.py", line 1, in <module>
    y()
{}

"""
OOM = "torch.OutOfMemoryError: Tried to allocate 2 GiB"


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (HEALTHY, None),
        (HEALTHY + RAISED.format(OOM), "out of GPU memory"),
        # Still starting: what was printed on the way was survived.
        (HEALTHY[: HEALTHY.index("[2026-11-30 17:18:32")] + RAISED.format(OOM),
         "out of GPU memory"),
        # Another rank came further before it heard of it.
        (RAISED.format(OOM) + "[2026-11-30 17:18:34 TP0] Load weight end. elapsed=1 s\n"
         + RAISED.format("torch.distributed.DistNetworkError: Connection closed by peer"),
         "out of GPU memory"),
        (RAISED.format("ModuleNotFoundError: No module named 'deep_ep'"), "library missing"),
        (RAISED.format("ncclSystemError: System call failed"), "other ranks unreachable"),
        ("ImportError: libcuda.so.1\nrank TP1 (pid 7) has died, killed by SIGKILL\n",
         "process killed"),
    ],
)  # fmt: skip
def test_what_was_survived_explains_nothing(log: str, name: str | None) -> None:
    cause = explain(log)
    assert (cause.name if cause else None) == name


def test_an_unknown_log_is_not_explained_away() -> None:
    assert explain("INFO all is well\n") is None


def test_a_taken_port_is_refused_before_the_start() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"port={other.getsockname()[1]}"
        for host in ("127.0.0.1", "0.0.0.0"):
            words = ("launch", "demo-cpu-balanced", "--set", taken, "--set", f"host={host}")
            assert "Use another: --set port=N." in run(*words, code=2)


@pytest.mark.parametrize(
    ("host", "at"),
    [
        ("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"),
        ("fe80::1%eth0", "[fe80::1%25eth0]"), ("node-3.lan", "node-3.lan"),
    ],
)  # fmt: skip
def test_a_server_is_asked_at_its_own_address(host: str, at: str) -> None:
    settings = ["port=7", *([f"host={host}"] if host else [])]
    assert url(compose(catalog.preset("demo-cpu-balanced"), settings)) == f"http://{at}:7"


def test_no_proxy_stands_between_a_server_and_itself(tmp_path: Path) -> None:
    show = "import os; print(os.environ['no_proxy'], os.environ['NO_PROXY'])"
    command = [sys.executable, "-c", show, "--host", "10.0.0.7"]
    child.start(command, tmp_path / "log", {"NO_PROXY": "a.b"}).wait()
    assert (tmp_path / "log").read_text().split() == ["a.b,localhost,127.0.0.1,::1,10.0.0.7"] * 2


def test_a_value_of_several_lines_stays_in_its_comment() -> None:
    value = "a\nit's \\ é\x01"
    head, *rest = run(
        "launch", "demo-cpu-balanced", "--emit", "yaml", "--set", f"FOO={value}"
    ).splitlines()
    assert "model-path" in yaml.safe_load("\n".join(rest))
    (word,) = re.findall(r"FOO=(\$'.*') python", head)
    assert subprocess.check_output(["bash", "-c", f"printf %s {word}"]).decode() == value


def test_kubernetes_expands_nothing_of_the_users() -> None:
    words = ("--set", "served-model-name=$(HOME)$$", "--set", "FOO=$(BAR)", "--set", "HF_HOME=/$a")
    workers, _ = yaml.safe_load_all(run("launch", TWO_NODES, "--emit", "k8s-lws", *words))
    pod = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    assert "$$(HOME)$$$$" in container["command"]
    assert {"name": "FOO", "value": "$$(BAR)"} in container["env"]
    assert {"name": "HF_HOME", "value": "/$$a"} in container["env"]
    assert {"name": "models", "mountPath": "/$a"} in container["volumeMounts"]


LONG = "a" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ("launch", LONG),
        ("launch", f"{LONG}.yaml"),
        ("plan", "--model", LONG, "--hardware", "8xh100"),
        ("plan", "--model", "qwen3-8b", "--hardware", f"{'9' * 5000}xh100"),
        ("plan", "--model", "qwen3-8b", "--hardware", "00xh100"),
        ("plan", "--model", "qwen3-8b", "--hardware", "8xh100", "--preset", f"{LONG}.yaml"),
        ("plan", "--model", "qwen3-8b", "--hardware", "8xh100", "--concurrency", f"1{'0' * 400}"),
        ("plan", "--model", "qwen3-30b-a3b", "--hardware", "8xh100", "--imbalance", "1e308"),
    ],
)
def test_what_no_machine_holds_is_a_mistake_too(words: tuple[str, ...]) -> None:
    assert "Unforeseen" not in run(*words, code=2)


def test_a_deeply_nested_file_is_a_mistake(tmp_path: Path) -> None:
    for suffix in ("json", "yaml"):
        path = tmp_path / f"deep.{suffix}"
        path.write_text("[" * 5000)
        assert "a readable YAML or JSON file" in run("launch", str(path), code=2)


def test_what_nobody_foresaw_ends_with_2_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(catalog, "preset", broken)
    assert run("launch", "x", code=2) == (
        "error: ZeroDivisionError: division by zero. Unforeseen: PYTHONDEVMODE=1 shows where.\n"
    )
