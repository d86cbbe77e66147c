"""Predictions against bench results: error by region, and how often a pair is ranked right.

One JSON object per line: `model`, `hardware`, `layout` (sizes as `Layout` has them), `load`
(input_tokens, output_tokens, concurrency) and what was measured: `throughput` (output tokens per
second over all GPUs), optionally `tpot_ms` and `ttft_ms`, `conditional` (acceptance by position).
Or one results file of `sglang-ext bench`, which `bench_points` turns into such objects.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from sglang_ext.core.layout import LayoutError
from sglang_ext.launcher import catalog
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.fields import Fields
from sglang_ext.launcher.model_config import MOST_DRAFTS
from sglang_ext.planner.acceptance import Curve, conditional
from sglang_ext.planner.bench_points import bench_points, read_bench
from sglang_ext.planner.layout import Layout, breaks
from sglang_ext.planner.numbers import Basis, weakest
from sglang_ext.planner.search import Question, predict
from sglang_ext.planner.shape import read_shape

KNOWN = (
    "model",
    "hardware",
    "layout",
    "load",
    "throughput",
    "tpot_ms",
    "ttft_ms",
    "conditional",
    "source",
)


@dataclass(frozen=True)
class Point:
    """One bench result beside its prediction; values by metric."""

    region: str
    setting: tuple[str, str, str]
    layout: str
    measured: dict[str, float]
    predicted: dict[str, float]
    basis: Basis

    def error(self, metric: str) -> float:
        """Relative: |predicted - measured| / measured."""
        return abs(self.predicted[metric] - self.measured[metric]) / self.measured[metric]


@dataclass(frozen=True)
class Region:
    """Relative errors of one metric in one region of load."""

    name: str
    metric: str
    points: int
    median: float
    p90: float


@dataclass(frozen=True)
class Validation:
    """pairs: of layouts measured under one load; ranked_right: how many the planner orders so

    basis: of the predictions; left_out: servers of the file that the planner does not model
    """

    regions: list[Region]
    pairs: int
    ranked_right: int
    basis: Basis
    left_out: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        share = self.ranked_right / self.pairs if self.pairs else None
        return {**asdict(self), "share_ranked_right": share}


def validate(path: Path, model: str | None = None, hardware: str | None = None) -> Validation:
    """The whole file. model, hardware: what a results file of `sglang-ext bench` was measured on.

    Raises:
        ConfigError: a line that is no result, naming it; a model or hardware missing, or too many.
    """
    bench = read_bench(path)
    left_out: tuple[str, ...] = ()
    if bench is not None:
        rows, left_out = bench_points(bench, str(path), model, hardware)
    else:
        _refuse_names(path, {"--model": model, "--hardware": hardware})
        rows = list(_lines(path))
    points = [_point(raw, where) for where, raw in rows]
    if not points:
        raise ConfigError(
            str(path),
            "file",
            expected="at least one result",
            found="none",
            remedy="Write one JSON object per line.",
        )
    pairs, right = _pairs(points)
    basis = weakest(*(point.basis for point in points))
    return Validation(_regions(points), pairs, right, basis, left_out)


def _refuse_names(path: Path, given: dict[str, str | None]) -> None:
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                "plan",
                option,
                expected=f"none, since the lines of {path} name their own",
                found=value,
                remedy="Leave it out.",
            )


def _lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path),
            "file",
            expected="a readable file",
            found=str(error),
            remedy="Name the results of a bench.",
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                where,
                "line",
                expected="one JSON object",
                found=str(error),
                remedy="Write one result per line.",
            ) from error
        if not isinstance(raw, dict):
            raise ConfigError(
                where,
                "line",
                expected="one JSON object",
                found=type(raw).__name__,
                remedy="Write one result per line.",
            )
        yield where, raw


def _point(raw: dict[str, Any], where: str) -> Point:
    f = Fields(raw, where, KNOWN)
    load = Fields(
        f.mapping("load"), f"{where}, load", ("input_tokens", "output_tokens", "concurrency")
    )
    model, hardware = catalog.model(f.text("model")), catalog.hardware(f.text("hardware"))
    layout = _layout(f.mapping("layout"), f"{where}, layout", model, hardware)
    curve = Curve(conditional(f), "measured", where) if "conditional" in raw else None
    if curve and not layout.algorithm:
        raise f.error("conditional", "an algorithm in `layout` beside it", "none")
    question = Question(
        model,
        hardware,
        catalog.Load(
            load.whole("input_tokens", at_least=1),
            load.whole("output_tokens", at_least=1),
            load.whole("concurrency", at_least=1),
        ),
        curve=curve,
    )
    plan = predict(question, read_shape(model.config, model.name), layout)
    predicted = {
        "throughput": plan.throughput,
        "tpot_ms": plan.tpot * 1e3,
        "ttft_ms": plan.ttft * 1e3,
    }
    measured = {name: f.number(name) for name in predicted if name in raw}
    if "throughput" not in measured or not all(measured.values()):
        raise f.error("throughput", "a number above 0", raw.get("throughput"))
    setting = (model.name, hardware.name, json.dumps(raw["load"], sort_keys=True))
    return Point(_region(question.load), setting, layout.name, measured, predicted, plan.basis)


def _layout(
    raw: dict[str, Any], where: str, model: catalog.Model, hardware: catalog.Hardware
) -> Layout:
    f = Fields(raw, where, tuple(field.name for field in fields(Layout)))
    algorithm = f.text("algorithm", "")
    if algorithm and not model.drafts:
        raise f.error("algorithm", f"none, since {model.name} has no known draft", algorithm)
    if algorithm:
        f.one_of("algorithm", tuple(model.drafts))
    elif "gamma" in raw:
        raise f.error("gamma", "an `algorithm` beside it", "none")
    layout = Layout(
        replicas=f.whole("replicas", at_least=1),
        tp=f.whole("tp", at_least=1),
        dp=f.whole("dp", 1, at_least=1),
        cp=f.whole("cp", 1, at_least=1),
        ep=f.whole("ep", 1, at_least=1),
        a2a=f.one_of("a2a", ("none", "deepep")) if "a2a" in raw else "none",
        tbo=f.flag("tbo", False),
        algorithm=algorithm,
        gamma=f.whole("gamma", at_least=1, at_most=MOST_DRAFTS) if algorithm else 0,
        redundant=f.whole("redundant", 0),
        sbo=f.flag("sbo", False),
        pp=f.whole("pp", 1, at_least=1),
    )
    try:
        ranks = layout.replicas * layout.ranks(nodes=1).world
    except LayoutError as error:
        broken = "; ".join(rule.text for rule in error.rules)
        raise f.error("sizes", broken, str(error.asked)) from error
    if ranks > hardware.gpus:
        raise f.error(
            "replicas x tp x pp", f"at most the {hardware.gpus} ranks of {hardware.name}", ranks
        )
    for broken in breaks(layout, model, hardware):
        raise f.error("sizes", f"a layout that {model.name} can have", layout.name, broken)
    return layout


def _region(load: catalog.Load) -> str:
    batch = "small batch" if load.concurrency <= 16 else "large batch"
    context = "short" if load.input_tokens + load.output_tokens <= 8192 else "long"
    return f"{batch}, {context} context"


def _regions(points: list[Point]) -> list[Region]:
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for point in points:
        for metric in point.measured:
            errors[point.region, metric].append(point.error(metric))
    return [
        Region(name, metric, len(values), median(values), percentile(values, 0.9))
        for (name, metric), values in sorted(errors.items())
    ]


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    place = max(1, -(-int(share * 1000) * len(ordered) // 1000))
    return ordered[min(place, len(ordered)) - 1]


def _pairs(points: list[Point]) -> tuple[int, int]:
    by_setting: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for point in points:
        by_setting[point.setting].append(point)
    pairs = [
        (a, b)
        for group in by_setting.values()
        for a, b in combinations(group, 2)
        if a.measured["throughput"] != b.measured["throughput"]
    ]
    right = sum(
        (a.measured["throughput"] > b.measured["throughput"])
        == (a.predicted["throughput"] > b.predicted["throughput"])
        for a, b in pairs
    )
    return len(pairs), right
