"""A LeaderWorkerSet, one pod per node, and a Service in front of the leader."""

from __future__ import annotations

import copy
import re
from typing import Any

import yaml

from sglang_ext.launcher.catalog import ROOT
from sglang_ext.launcher.compose import Launch
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.fields import load_mapping
from sglang_ext.launcher.surroundings import arguments, host, port

IMAGE = "lmsysorg/sglang:v0.5.23"
# A pod's labels hold at most 63 characters and repeat the name with a node's number and a hash.
LONGEST = 48
_LOOPBACK = re.compile(r"localhost|127\..*|::1")
_HEAD = """\
# {preset}. To adapt: the image (SGLang with sglang-ext installed)
# - volume `models`: a folder of each node; a claim in its place is shared
# - secret `hf-token`, key `token`: only for gated models, may be absent
"""
_HEAD_MANY = """\
# - resource `rdma/ib`: named by the cluster's RDMA device plugin
"""


def k8s_name(name: str) -> str:
    """A DNS label (RFC 1035): a letter, then lower case, digits and dashes."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"sglang-{label}"
    return label[:LONGEST].strip("-")


def to_kubernetes(launch: Launch) -> str:
    """The manifest.

    Raises:
        ConfigError: the server would listen where no other pod reaches it.
    """
    if _LOOPBACK.fullmatch(host(launch, "0.0.0.0")):
        raise ConfigError(
            launch.preset.name, "--host", expected="an address that other pods reach",
            found=host(launch, ""), remedy="Leave it out, or use --set host=0.0.0.0.",
        )  # fmt: skip
    parts = load_mapping(ROOT / "cluster" / "k8s-lws.yaml")
    workers, service = parts["workers"], parts["service"]
    name = k8s_name(launch.preset.name)
    template = workers["spec"]["leaderWorkerTemplate"]
    template["size"] = launch.hardware.nodes
    for role in ("leader", "worker"):
        pod = template[f"{role}Template"]
        pod["metadata"]["labels"]["app"] = name
        container = _container(launch, copy.deepcopy(parts))
        if role == "leader":
            container |= _served(port(launch))
        pod["spec"]["containers"] = [container]
        pod["spec"]["volumes"] = copy.deepcopy(parts["volumes"])
    workers["metadata"]["name"] = name
    # LeaderWorkerSet makes a Service of its own name, by which pods find their leader.
    service["metadata"]["name"] = f"{name}-leader"
    service["spec"]["selector"]["app"] = name
    service["spec"]["ports"] = [{"name": "http", "port": port(launch), "targetPort": port(launch)}]
    head = _HEAD.format(preset=launch.preset.name)
    head += _HEAD_MANY if launch.hardware.nodes > 1 else ""
    return head + yaml.safe_dump_all([workers, service], sort_keys=False)


def _container(launch: Launch, parts: dict[str, Any]) -> dict[str, Any]:
    command = ["python3", "-m", "sglang.launch_server", *map(_literal, arguments(launch))]
    if launch.hardware.nodes > 1:
        # Kubernetes expands $(NAME); LeaderWorkerSet sets these two in every pod.
        command += ["--nnodes", str(launch.hardware.nodes), "--node-rank", "$(LWS_WORKER_INDEX)"]
        command += ["--dist-init-addr", "$(LWS_LEADER_ADDRESS):20000"]
    command += ["--host", host(launch, "0.0.0.0"), "--port", str(port(launch))]
    env = {entry["name"]: entry for entry in parts["env"]}
    home = launch.env.get("HF_HOME", env["HF_HOME"]["value"])
    env |= {k: {"name": k, "value": _literal(v)} for k, v in launch.env.items()}
    limits = {}
    if not launch.hardware.gpu.is_cpu:
        limits["nvidia.com/gpu"] = str(launch.hardware.per_node)
    container: dict[str, Any] = {
        "name": "sglang",
        "image": IMAGE,
        "command": command,
        "env": list(env.values()),
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "models", "mountPath": home},
        ],
    }
    if launch.hardware.nodes > 1:
        limits |= parts["several_nodes"]["limits"]
        container["securityContext"] = parts["several_nodes"]["securityContext"]
    return container


def _literal(text: str) -> str:
    """Kubernetes reads $(NAME) as a variable, and $$ as $."""
    return text.replace("$", "$$")


def _served(at: int) -> dict[str, Any]:
    """What the leader's container has besides: it alone answers requests."""
    return {
        "ports": [{"containerPort": at, "name": "http"}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": at},
            "periodSeconds": 10,
            "failureThreshold": 360,
        },
    }
