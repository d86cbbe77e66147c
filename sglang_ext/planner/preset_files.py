"""Writes the planner's presets under `launch/presets`: `python -m sglang_ext.planner.preset_files`.

For each model, machine and point the best layout becomes a preset; where nothing fits there is
none. Pipelines are taken only where nothing else fits: no draft runs over their stages, and that
the stages are balanced is assumed. Presets of the CPU are written by hand and left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import Load
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.planner.report import preset_of, preset_yaml
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
# Models that fit one GPU several times over gain nothing from a server across nodes.
SMALL = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b")
LOADS: dict[Objective, Load] = {
    "low-latency": Load(4096, 1024, 8),
    "balanced": Load(4096, 1024, 128),
    "max-throughput": Load(4096, 1024, 512),
    "long-context": Load(120_000, 2048, 4),
}
SHORT_MODEL = Load(36_000, 2048, 8)  # long-context of models with 40,960 positions


def questions() -> Iterator[tuple[str, Question]]:
    """Name and question of every preset that could be."""
    for name in MODELS:
        model = catalog.model(name)
        for machine in MACHINES:
            if name in SMALL and "x8x" in machine:
                continue
            for point, load in LOADS.items():
                longest = model.config["max_position_embeddings"]
                fitted = load if load.input_tokens < longest else SHORT_MODEL
                question = Question(model, catalog.hardware(machine), fitted, point)
                yield f"{name}-{machine}-{point}", question


def texts() -> Iterator[tuple[str, str]]:
    """Name and contents of every preset that exists."""
    for name, question in questions():
        try:
            answer = search(question)
        except ConfigError:
            continue
        yield name, preset_yaml(preset_of(answer, chosen(answer), name))


def chosen(answer: Answer) -> Plan:
    """The best plan without pipeline stages, else the best."""
    flat = (plan for plan in answer.ranked if plan.layout.pp == 1)
    return next(flat, answer.ranked[0])


def write(folder: Path) -> int:
    """Writes them all and removes those that no longer are; how many there are."""
    wanted = dict(texts())
    for path in folder.glob("*.yaml"):
        if path.stem not in wanted and catalog.preset(path.stem).hardware != "cpu":
            path.unlink()
    for name, text in wanted.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return len(wanted)


if __name__ == "__main__":
    print(write(catalog.ROOT / "presets"))
