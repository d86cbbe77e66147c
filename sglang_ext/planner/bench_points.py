"""A results file of `sglang-ext bench` as the points that `validate` compares.

The file says how the server was started, under which loads, and what was measured; which entry of
`launch/base` and which machine that was, the user says.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_ext.bench_cli.turns import averaged
from sglang_ext.launcher import catalog
from sglang_ext.launcher.compose import read_words
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.fields import Fields
from sglang_ext.launcher.model_config import MOST_DRAFTS
from sglang_ext.planner.acceptance import constant_rate

# Field of `Layout` -> SGLang's flag.
_SIZES = {
    "replicas": "dp-size",
    "tp": "tp-size",
    "dp": "attn-dp-size",
    "cp": "attn-cp-size",
    "ep": "ep-size",
    "pp": "pp-size",
    "redundant": "ep-num-redundant-experts",
}
_SWITCHES = {"tbo": "enable-two-batch-overlap", "sbo": "enable-single-batch-overlap"}
# What a point is measured in beside its throughput: ours -> the file's.
_MEASURED = {"tpot_ms": "median_tpot_ms", "ttft_ms": "median_ttft_ms"}


def read_bench(path: Path) -> dict[str, Any] | None:
    """The file's contents, None where it is not of `sglang-ext bench`."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and {"launch_arguments", "load", "points"} <= found.keys():
            return found
    return None


def bench_points(
    found: dict[str, Any], where: str, model: str | None, hardware: str | None
) -> tuple[list[tuple[str, dict[str, Any]]], tuple[str, ...]]:
    """(name, point) of all that the planner can predict, and the algorithms it cannot.

    A run's acceptance length becomes the constant rate per position that gives it.

    Raises:
        ConfigError: no model or hardware, or a field that is missing or cannot be.
    """
    for option, value, known in (
        ("--model", model, "base"),
        ("--hardware", hardware, "gpus"),
    ):
        if value is None:
            raise ConfigError(
                "plan",
                option,
                expected=f"what {where} was measured on",
                found="nothing",
                remedy=f"Known: {', '.join(catalog.names(known))}.",
            )
    drafts = catalog.model(str(model)).drafts
    file = Fields(found, where, None)
    sizes = _sizes(list(file.names("launch_arguments")))
    load = file.mapping("load")
    output_tokens = Fields(load, f"{where}, load", None).whole("output_tokens", at_least=1)
    rows, left_out = [], []
    points, again = file.mapping("points"), file.mapping("again", {})
    for key, raw in (*points.items(), *again.items()):
        Fields(raw, f"{where}, {key}", None)
    for key, raw in averaged(points, again).items():
        f = Fields(raw, f"{where}, {key}", None)
        algorithm = f.text("algorithm").lower()
        if algorithm != "none" and algorithm not in drafts:
            left_out.append(f.text("algorithm"))
            continue
        point: dict[str, Any] = {
            "model": model,
            "hardware": hardware,
            "layout": dict(sizes),
            "load": {
                "input_tokens": f.whole("input_tokens", at_least=1),
                "output_tokens": output_tokens,
                "concurrency": f.whole("concurrency", at_least=1),
            },
            "throughput": f.number("output_tokens_per_second"),
            "source": f"{where}, {key}",
        }
        point |= {ours: raw[theirs] for ours, theirs in _MEASURED.items() if f.has(theirs)}
        if algorithm != "none":
            gamma = drafts[algorithm].gamma
            if f.has("gamma"):
                gamma = f.whole("gamma", at_least=1, at_most=MOST_DRAFTS)
            point["layout"] |= {"algorithm": algorithm, "gamma": gamma}
            if f.has("acceptance_length"):
                point["conditional"] = [constant_rate(_length(f, gamma), gamma)] * gamma
        rows.append((str(point["source"]), point))
    return rows, tuple(dict.fromkeys(left_out))


def _length(f: Fields, gamma: int) -> float:
    length = f.number("acceptance_length")
    if not 1 <= length <= gamma + 1:
        raise f.error("acceptance_length", f"1 to {gamma + 1}, of {gamma} drafts", length)
    return length


def _sizes(words: list[str]) -> dict[str, Any]:
    flags = read_words(words)
    # SGLang's deprecated spelling, whose --dp-size counts attention groups.
    if flags.pop("enable-dp-attention", False):
        flags.setdefault("attn-dp-size", flags.pop("dp-size", 1))
    sizes: dict[str, Any] = {"replicas": 1, "tp": 1}
    sizes |= {name: flags[flag] for name, flag in _SIZES.items() if flag in flags}
    sizes |= {name: True for name, flag in _SWITCHES.items() if flags.get(flag) is True}
    a2a = flags.get("moe-a2a-backend", "none")
    if a2a != "none":
        sizes |= {"a2a": a2a, "ep": sizes["tp"]}
    return sizes
