"""Writes the planner's presets under `launch/presets`: `python -m sglang_ext.planner.preset_files`.

For each model, machine and point the best layout becomes a preset. A load that does not fit is cut
to the most requests at a time that do. Where none fits there is no preset, and `launch/absent.yaml`
says why and what to use. Pipelines are taken only where nothing else fits: no draft runs over their
stages, and that the stages are balanced is assumed. Presets of the CPU are written by hand and left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import Load
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.planner.refused import DoesNotFit
from sglang_ext.planner.report import fraction_of, preset_of, preset_yaml
from sglang_ext.planner.search import Answer, Objective, Plan, Question, search

MODELS = (
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "deepseek-v3.2",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
)
MACHINES = (
    "8xa100",
    "8xh20",
    "8xh100",
    "8xh200",
    "2x8xh100",
    "2x8xh200",
    "4x8xh100",
    "8xb200",
)
BUILT_IN = "demo"
# A node of these machines holds each several times over: a server across nodes gains nothing.
SMALL = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b")
LOADS: dict[Objective, Load] = {
    "low-latency": Load(4096, 1024, 8),
    "balanced": Load(4096, 1024, 128),
    "max-throughput": Load(4096, 1024, 512),
    "long-context": Load(120_000, 2048, 4),
}
SHORT_MODEL = Load(36_000, 2048, 8)  # long-context of models with 40,960 positions


def names() -> Iterator[tuple[str, str, Objective]]:
    """Model, machine and point of every preset that could be asked for, the CPU's own left out."""
    for model in (*MODELS, BUILT_IN):
        for machine in MACHINES if model == BUILT_IN else (*MACHINES, "cpu"):
            for point in LOADS:
                yield model, machine, point


def question(model: str, machine: str, point: Objective) -> Question:
    """What the planner is asked for a preset."""
    found, load = catalog.model(model), LOADS[point]
    fits = load.input_tokens < found.config["max_position_embeddings"]
    return Question(found, catalog.hardware(machine), load if fits else SHORT_MODEL, point)


def text(model: str, machine: str, point: Objective) -> str:
    """Contents of the preset.

    Raises:
        ConfigError: there is none, with the reason and what to use.
    """
    if reason := needless(model, machine):
        raise ConfigError(model, "preset", expected="one", found="none", remedy=reason)
    asked = question(model, machine, point)
    answer = fitted(asked)
    preset = preset_of(answer, chosen(answer), f"{model}-{machine}-{point}")
    if answer.question.load != asked.load:
        less = f"{preset.source}; {asked.load.concurrency} at a time do not fit"
        preset = replace(preset, source=less)
    return preset_yaml(preset)


def needless(model: str, machine: str) -> str:
    """Why nobody needs the presets of a model on a machine, or nothing. POINT stands for theirs."""
    if model == BUILT_IN:
        plan = f"sglang-ext plan --model {model} --hardware {machine} --preset FILE.yaml"
        return f"The built-in model needs no GPU: use {model}-cpu-POINT; `{plan}` uses them."
    nodes = catalog.hardware(machine)
    if model in SMALL and nodes.nodes > 1:
        one = f"{nodes.per_node}x{nodes.gpu.name}"
        return (
            f"One node holds {model} several times over, and replicas do not span nodes: start "
            f"{model}-{one}-POINT on each of the {nodes.nodes}, with a router in front."
        )
    return ""


# A server for fewer requests at a time than this is none.
FEWEST = 8


def fitted(asked: Question) -> Answer:
    """The answer for the load, or for as many of its requests as fit, in eights.

    They leave room for a share of memory in hundredths.

    Raises:
        ConfigError: not eight of them fit, or no layout can be.
    """
    try:
        return search(asked)
    except DoesNotFit as error:
        for many in range(error.most // FEWEST * FEWEST, 0, -FEWEST):
            answer = search(replace(asked, load=replace(asked.load, concurrency=many)))
            share = fraction_of(chosen(answer))
            if share == round(share, 2):
                return answer
        if error.most or error.tokens:
            what = f"{asked.load.concurrency} requests of {_length(asked.load)} tokens at a time"
            reason = f"It is for {what}. {error.remedy}"
            raise ConfigError("preset", "load", expected=what, found=0, remedy=reason) from error
        raise


def _length(load: Load) -> int:
    return load.input_tokens + load.output_tokens


def chosen(answer: Answer) -> Plan:
    """The best plan without pipeline stages, else the best."""
    flat = (plan for plan in answer.ranked if plan.layout.pp == 1)
    return next(flat, answer.ranked[0])


def write(folder: Path) -> int:
    """Writes presets and absences, and removes presets that no longer are; how many there are."""
    found: dict[str, str] = {}
    absent: dict[str, str] = {}
    for model, machine, point in names():
        name = f"{model}-{machine}-{point}"
        try:
            found[name] = text(model, machine, point)
        except ConfigError as error:
            absent[name] = error.remedy
    for path in (folder / "presets").glob("*.yaml"):
        if path.stem not in found and catalog.preset(path.stem).hardware != "cpu":
            path.unlink()
    for name, contents in found.items():
        (folder / "presets" / f"{name}.yaml").write_text(contents, encoding="utf-8")
    written = yaml.safe_dump(_shared(absent), sort_keys=False, width=98)
    (folder / "absent.yaml").write_text(ABSENT + written, encoding="utf-8")
    return len(found)


ABSENT = """\
# Why there is no preset of that name, or of that model and machine, POINT standing for the point.
# Written by python -m sglang_ext.planner.preset_files.
"""


def _shared(absent: dict[str, str]) -> dict[str, str]:
    """One entry for a model and machine where all points lack a preset for one reason."""
    shared: dict[str, str] = {}
    for name, reason in absent.items():
        point = next(point for point in LOADS if name.endswith(point))
        stem = name.removesuffix(f"-{point}")
        same = all(absent.get(f"{stem}-{other}") == reason for other in LOADS)
        shared[stem if same else name] = reason
    return shared


if __name__ == "__main__":
    print(write(catalog.ROOT))
