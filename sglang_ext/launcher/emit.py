"""What a cluster runs, written from one launch: YAML, a shell script, Slurm, Kubernetes, Ray."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import yaml

from sglang_ext.launcher.catalog import ROOT
from sglang_ext.launcher.compose import Launch, flag_names, list_words
from sglang_ext.launcher.kubernetes import k8s_name, to_kubernetes
from sglang_ext.launcher.surroundings import arguments, host, port


def to_yaml(launch: Launch) -> str:
    """A file for SGLang's own `--config`."""
    settings: dict[str, Any] = {}
    for name, value in launch.effective().items():
        is_list = name in flag_names().lists
        settings[name] = list_words(str(value)) if is_list else value
    head = f"# {launch.preset.name}. Run: {_environment_words(launch)}"
    head += "python -m sglang.launch_server --config FILE"
    if launch.hardware.nodes > 1:
        head += f" --nnodes {launch.hardware.nodes} --node-rank R --dist-init-addr HOST:PORT"
    return f"{head}\n" + yaml.safe_dump(settings, sort_keys=False)


def _environment_words(launch: Launch) -> str:
    return "".join(f"{k}={_on_one_line(v)} " for k, v in launch.env.items())


def _on_one_line(value: str) -> str:
    """A word of a bash command that stands in a comment."""
    if value.isprintable():
        return shlex.quote(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    octal = (c if c.isprintable() else "".join(f"\\{b:03o}" for b in c.encode()) for c in escaped)
    return f"$'{''.join(octal)}'"


def _exports(launch: Launch) -> str:
    return "\n".join(f"export {k}={shlex.quote(v)}" for k, v in launch.env.items())


def _lines(launch: Launch, indent: str) -> str:
    """One flag with its values per line of shell."""
    lines: list[str] = []
    for word in arguments(launch):
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
        host=host(launch, "127.0.0.1"),
        port=port(launch),
    )


def to_slurm(launch: Launch) -> str:
    """An sbatch script: one task per node."""
    # The command stands inside single quotes of the script, where a quote has to be spelt out.
    words = _lines(launch, "    ").replace("'", "'\\''")
    gpus = launch.hardware.per_node
    on_gpus = "" if launch.hardware.gpu.is_cpu else f"#SBATCH --gpus-per-node={gpus}\n"
    return _fill(
        "slurm.sh.tmpl",
        preset=launch.preset.name,
        job=k8s_name(launch.preset.name),
        nodes=launch.hardware.nodes,
        gpu_line=on_gpus,
        exports=_exports(launch),
        arguments=words,
        host=host(launch, "0.0.0.0"),
        port=port(launch),
    )


def to_ray(launch: Launch) -> str:
    """A Python script for a Ray cluster: one placement-group bundle per node."""
    return _fill(
        "ray.py.tmpl",
        preset=launch.preset.name,
        nodes=launch.hardware.nodes,
        gpus=0 if launch.hardware.gpu.is_cpu else launch.hardware.per_node,
        host=host(launch, "0.0.0.0"),
        port=port(launch),
        arguments_json=json.dumps(arguments(launch)),
        environment_json=json.dumps(launch.env),
    )


WRITERS: dict[str, Callable[[Launch], str]] = {
    "yaml": to_yaml,
    "bash": to_bash,
    "slurm": to_slurm,
    "k8s-lws": to_kubernetes,
    "ray": to_ray,
}
