"""Emitted files against the clusters' own tools, where a machine has them.

Slurm and Ray run what was emitted, with a stand-in for the server that prints its arguments.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sglang_ext.cli import app
from tests.unit.kubernetes_fields import FORMS, misfits

CPU = "demo-cpu-balanced"
ONE_NODE, TWO_NODES = "qwen3-8b-8xh100-balanced", "deepseek-v3.2-2x8xh200-low-latency"


def _emitted(preset: str, kind: str, *words: str) -> str:
    result = CliRunner().invoke(app, ["launch", preset, "--emit", kind, *words])
    assert result.exit_code == 0, result.output
    return result.output


def _arguments(preset: str) -> list[str]:
    """Of the dry run on one node."""
    result = CliRunner().invoke(app, ["launch", preset, "--dry-run", "--json"])
    return list(json.loads(result.output)["argv"])


@pytest.mark.parametrize("preset", [ONE_NODE, TWO_NODES])
def test_a_manifest_has_the_fields_of_its_schema(preset: str) -> None:
    """With settings of a user's; `test_launch_presets` looks at every preset."""
    for words in ((), ("--set", "port=31000", "--set", "NCCL_DEBUG=WARN", "--set", "A=$(id)")):
        documents = list(yaml.safe_load_all(_emitted(preset, "k8s-lws", *words)))
        assert [d["kind"] for d in documents] == ["LeaderWorkerSet", "Service"]
        for document in documents:
            assert list(misfits(document, FORMS[document["kind"]])) == []


# What is put into the two-node manifest -> what has to be said of it.
SPOILT: dict[str, tuple[str, Any, str]] = {
    "apiVersion": ("apiVersion", "leaderworkerset.x-k8s.io/v1beta1", "expected leaderworkerset"),
    "misspelt": ("spec/restartpolicy", "None", "unknown"),
    "elsewhere": ("spec/leaderWorkerTemplate/startupPolicy", "LeaderReady", "unknown"),
    "no choice": ("spec/startupPolicy", "LeaderRunning", "expected LeaderCreated | LeaderReady"),
    "text for a number": ("spec/leaderWorkerTemplate/size", "2", "expected integer"),
    "too many": ("spec/replicas", 1000001, "expected integer 0 to 1000000"),
    "half a policy": ("spec/networkConfig", {}, "/subdomainPolicy: missing"),
    "no pod": ("spec/leaderWorkerTemplate/workerTemplate", None, "expected a mapping"),
    "a pod's own": ("spec/leaderWorkerTemplate/leaderTemplate/spec/shmSize", "1Gi", "unknown"),
    "no mapping": ("spec/leaderWorkerTemplate/leaderTemplate/spec/containers", {}, "a list"),
    "quantity": ("spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/resources/limits",
                 {"nvidia.com/gpu": "eight"}, "expected quantity"),
    "port": ("spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0/readinessProbe/httpGet",
             {"path": "/health"}, "/port: missing"),
    "volume": ("spec/leaderWorkerTemplate/workerTemplate/spec/volumes/1/hostPath/type", "Folder",
               "expected DirectoryOrCreate"),
    "variable": ("spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/env/0/value", 8,
                 "expected string"),
    "not described": ("spec/leaderWorkerTemplate/workerTemplate/spec/affinity", {}, "expected obj"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_manifest_is_seen(name: str, manifest: dict[str, Any]) -> None:
    path, value, said = SPOILT[name]
    *above, last = path.split("/")
    spoilt = at = copy.deepcopy(manifest)
    for step in above:
        at = at[int(step)] if step.isdigit() else at[step]
    at[last] = value
    (found,) = misfits(spoilt, FORMS["LeaderWorkerSet"])
    assert found.startswith(f"/{path}")
    assert said in found


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    workers, _ = yaml.safe_load_all(_emitted(TWO_NODES, "k8s-lws"))
    return dict(workers)


@pytest.mark.parametrize("preset", [ONE_NODE, TWO_NODES])
def test_pods_and_service_fit_kubernetes_schema(preset: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    workers, service = yaml.safe_load_all(_emitted(preset, "k8s-lws"))
    template = workers["spec"]["leaderWorkerTemplate"]
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role},
         "template": template[f"{role}Template"]}
        for role in ("leader", "worker")
    ]  # fmt: skip
    for found in (*pods, service):
        checker.validate(found, checker.latest_version(), strict=True)


_LISTS: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList", "apiVersion": "v1",
        "groups": [{
            "name": "leaderworkerset.x-k8s.io",
            "versions": [{"groupVersion": "leaderworkerset.x-k8s.io/v1", "version": "v1"}],
        }],
    },
    "/api/v1": {
        "kind": "APIResourceList", "groupVersion": "v1",
        "resources": [{"name": "services", "namespaced": True, "kind": "Service", "verbs": []}],
    },
    "/apis/leaderworkerset.x-k8s.io/v1": {
        "kind": "APIResourceList", "groupVersion": "leaderworkerset.x-k8s.io/v1",
        "resources": [{
            "name": "leaderworkersets", "namespaced": True, "kind": "LeaderWorkerSet", "verbs": [],
        }],
    },
}  # fmt: skip


class _ApiServer(BaseHTTPRequestHandler):
    """Says which kinds there are, which is all that a dry run asks."""

    def do_GET(self) -> None:
        found = _LISTS.get(self.path.split("?")[0])
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found or {"kind": "Status", "code": 404}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _api_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ApiServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def test_kubectl_takes_the_manifest(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    manifest = tmp_path / "lws.yaml"
    manifest.write_text(_emitted(TWO_NODES, "k8s-lws"))
    with _api_server() as url:
        command = ["kubectl", "--server", url, "--cache-dir", str(tmp_path / "cache"), "create"]
        command += ["--dry-run=client", "--validate=false", "-f", str(manifest), "-o", "name"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = [line.partition("/")[0] for line in done.stdout.splitlines()]
    assert kinds == ["leaderworkerset.leaderworkerset.x-k8s.io", "service"]


def test_slurm_runs_the_script(tmp_path: Path) -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("Slurm is not installed")
    shown = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, timeout=60)
    if "idle" not in shown.stdout:
        pytest.skip("no idle Slurm node here")
    script, python = tmp_path / "run.sh", tmp_path / "python"
    script.write_text(_emitted(CPU, "slurm", "--set", "served-model-name=it's a b"))
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "SGLANG_PORT": "31234"}
    command = ["sbatch", "--wait", "--export=ALL", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("demo-cpu-balanced-*.log")
    words = log.read_text().splitlines()
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert set(_arguments(CPU)) <= set(words)
    assert "it's a b" in words
    at = words.index("--nnodes")
    assert words[at : at + 5] == ["--nnodes", "1", "--node-rank", "0", "--dist-init-addr"]
    assert words[at + 6 :] == ["--host", "0.0.0.0", "--port", "31234"]


@pytest.mark.slow
def test_ray_runs_the_script(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    ray = str(Path(sys.executable).with_name("ray"))
    stand_in = tmp_path / "sglang"
    stand_in.mkdir()
    (stand_in / "__init__.py").touch()
    (stand_in / "launch_server.py").write_text(
        "import json, os, sys\n"
        f"open({str(tmp_path / 'words')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
        "raise SystemExit(3)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(_emitted(CPU, "ray"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "RAY_raylet_start_wait_time_s": "300"}
    start = [ray, "start", "--head", "--num-cpus", "2", "--num-gpus", "0", "--port", "0",
             "--include-dashboard", "false"]  # fmt: skip
    began = subprocess.run(start, capture_output=True, text=True, timeout=400, env=env)
    try:
        address = re.search(r"--address='([^']+)'", began.stdout)
        assert address, began.stdout + began.stderr
        env["RAY_ADDRESS"] = address[1]
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=400, env=env
        )
    finally:
        subprocess.run([ray, "stop"], capture_output=True, timeout=120)
    # The server's own exit code is the script's.
    assert done.returncode == 3, done.stderr
    words = json.loads((tmp_path / "words").read_text())
    assert set(_arguments(CPU)) <= set(words)
    assert words[-4:] == ["--host", "0.0.0.0", "--port", "30000"]
