"""What a cluster runs, written from one launch: YAML, a shell script, Slurm, Kubernetes, Ray."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import yaml

from sglang_ext.launcher.catalog import ROOT
from sglang_ext.launcher.compose import Launch, flag_names
from sglang_ext.launcher.fields import load_mapping

PORT = 30000
IMAGE = "lmsysorg/sglang:v0.5.23"
# Several nodes are joined by what runs the script, so these never stand in an emitted file.
_JOINED = ("nnodes", "node-rank", "dist-init-addr", "host", "port")


def _arguments(launch: Launch) -> list[str]:
    kept = {k: v for k, v in launch.flags.items() if k not in _JOINED}
    return Launch(launch.preset, launch.model, launch.hardware, kept, {}, launch.extra).argv()


def to_yaml(launch: Launch) -> str:
    """A file for SGLang's own `--config`."""
    settings: dict[str, Any] = {}
    for name, value in launch.effective().items():
        is_list = name in flag_names().lists
        settings[name] = str(value).split(" ") if is_list else value
    head = f"# {launch.preset.name}. Run: {_environment_words(launch)}"
    head += "python -m sglang.launch_server --config FILE\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def _environment_words(launch: Launch) -> str:
    return "".join(f"{k}={shlex.quote(v)} " for k, v in launch.env.items())


def _exports(launch: Launch) -> str:
    return "\n".join(f"export {k}={shlex.quote(v)}" for k, v in launch.env.items())


def _lines(launch: Launch, indent: str) -> str:
    """One flag with its values per line of shell."""
    lines: list[str] = []
    for word in _arguments(launch):
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return f" \\\n{indent}".join(lines)


def _fill(template: str, **values: object) -> str:
    text = (ROOT / "cluster" / template).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda m: str(values[m[1].lower()]), text)


def to_bash(launch: Launch) -> str:
    """A script that becomes the server on one node."""
    many = launch.hardware.nodes > 1
    joined = f'--nnodes {launch.hardware.nodes} --node-rank "${{NODE_RANK:?0 to '
    joined += f'{launch.hardware.nodes - 1}}}" --dist-init-addr '
    joined += '"${DIST_INIT_ADDR:?HOST:PORT of node 0}" \\\n  '
    return _fill(
        "node.sh.tmpl",
        preset=launch.preset.name,
        exports=_exports(launch),
        arguments=_lines(launch, "  "),
        last=launch.hardware.nodes - 1,
        node_arguments=joined if many else "",
    )


def to_slurm(launch: Launch) -> str:
    """An sbatch script: one task per node."""
    # The command stands inside single quotes of the script, where a quote has to be spelt out.
    arguments = _lines(launch, "    ").replace("'", "'\\''")
    return _fill(
        "slurm.sh.tmpl",
        preset=launch.preset.name,
        job=k8s_name(launch.preset.name),
        nodes=launch.hardware.nodes,
        gpus=launch.hardware.per_node,
        exports=_exports(launch),
        arguments=arguments,
    )


def to_ray(launch: Launch) -> str:
    """A Python script for a Ray cluster: one placement-group bundle per node."""
    return _fill(
        "ray.py.tmpl",
        preset=launch.preset.name,
        nodes=launch.hardware.nodes,
        gpus=launch.hardware.per_node,
        arguments_json=json.dumps(_arguments(launch)),
        environment_json=json.dumps(launch.env),
    )


def k8s_name(name: str) -> str:
    """A DNS label (RFC 1123): lower case, digits and dashes, at most 63."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")


def to_kubernetes(launch: Launch) -> str:
    """A LeaderWorkerSet, one pod per node, and a Service in front of the leader."""
    documents = load_mapping(ROOT / "cluster" / "k8s-lws.yaml")
    name = k8s_name(launch.preset.name)
    template = documents["workers"]["spec"]["leaderWorkerTemplate"]
    template["size"] = launch.hardware.nodes
    for role in ("leader", "worker"):
        pod = template[f"{role}Template"]
        pod["metadata"]["labels"]["app"] = name
        pod["spec"]["containers"] = [_container(launch, is_leader=role == "leader")]
        shared = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}
        pod["spec"]["volumes"] = [shared]
    documents["workers"]["metadata"]["name"] = name
    documents["service"]["metadata"]["name"] = name
    documents["service"]["spec"]["selector"]["app"] = name
    return yaml.safe_dump_all(documents.values(), sort_keys=False)


def _container(launch: Launch, *, is_leader: bool) -> dict[str, Any]:
    command = ["python3", "-m", "sglang.launch_server", *_arguments(launch)]
    if launch.hardware.nodes > 1:
        # Kubernetes expands $(NAME); LeaderWorkerSet sets these two in every pod.
        command += ["--nnodes", str(launch.hardware.nodes), "--node-rank", "$(LWS_WORKER_INDEX)"]
        command += ["--dist-init-addr", "$(LWS_LEADER_ADDRESS):20000"]
    command += ["--host", "0.0.0.0", "--port", str(PORT)]
    container: dict[str, Any] = {
        "name": "sglang",
        "image": IMAGE,
        "command": command,
        "env": [{"name": k, "value": v} for k, v in launch.env.items()],
        "resources": {"limits": {"nvidia.com/gpu": str(launch.hardware.per_node)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if launch.hardware.gpu.is_cpu:
        container["resources"] = {}
    if is_leader:
        container["ports"] = [{"containerPort": PORT, "name": "http"}]
        container["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": PORT},
            "periodSeconds": 10,
            "failureThreshold": 360,
        }
    return container


WRITERS: dict[str, Callable[[Launch], str]] = {
    "yaml": to_yaml,
    "bash": to_bash,
    "slurm": to_slurm,
    "k8s-lws": to_kubernetes,
    "ray": to_ray,
}
