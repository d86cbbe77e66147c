"""The results file: grows point by point, so that a run that was ended goes on where it stopped."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.bench_cli.grid import Point, Setting
from sglang_ext.bench_cli.tools import Load
from sglang_ext.bench_cli.turns import averaged
from sglang_ext.launcher.fields import Fields
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.suite import Result

# Relative drift of the base below which nothing is said of it.
_STEADY = 0.05
_REMEDY = "Give another --out, or delete the file to measure everything again."


class Results:
    """What has been measured so far.

    argv, load: must be those of the file, since its points are compared with the new ones.
    """

    def __init__(self, path: Path, argv: Sequence[str], load: Load) -> None:
        self.path = path
        wanted = {"launch_arguments": list(argv), "load": asdict(load)}
        self.data: dict[str, Any] = {**wanted, "machine": _machine(), "gates": {}, "points": {}}
        if path.exists():
            self.data = self._read(wanted)

    def _read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
            gates, points = found["gates"], found["points"]
            again = found.get("again", {})
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise CannotTest(
                f"--out {self.path}", expected="results of bench", found=error, remedy=_REMEDY
            ) from error
        for field, value in wanted.items():
            if found.get(field) != value:
                raise CannotTest(
                    f"--out {self.path}, {field}",
                    expected=str(value),
                    found=found.get(field),
                    remedy=_REMEDY,
                )
        if not all(isinstance(part, dict) for part in (gates, points, again)):
            raise CannotTest(
                f"--out {self.path}", expected="gates and points", found="others", remedy=_REMEDY
            )
        every = [*points.values(), *again.values()]
        if not all(isinstance(p, dict) and {"draft", "file"} <= p.keys() for p in every):
            raise CannotTest(
                f"--out {self.path}, points",
                expected="the draft and the data file of each",
                found="results of an earlier version",
                remedy=_REMEDY,
            )
        self._check_fields(found)
        return dict(found)

    def _check_fields(self, found: dict[str, Any]) -> None:
        """Raises InputError for a field without which the tables cannot be written."""
        where = f"--out {self.path}"
        machine = Fields(found.get("machine"), f"{where}, machine", None)
        for name in ("device", "processor", "sglang", "torch"):
            machine.text(name)
        for name in ("cpu", "sglang_ext"):
            machine.text(name, "")
        machine.whole("cpus", at_least=1)
        machine.whole("threads", 1, at_least=1)
        for key, point in [*found["points"].items(), *found.get("again", {}).items()]:
            f = _server_fields(point, f"{where}, {key}")
            f.text("dataset")
            f.whole("concurrency", at_least=1)
            for name in ("output_tokens_per_second", "load_average"):
                f.number(name)
            for name in ("acceptance_length", "median_tpot_ms", "median_ttft_ms"):
                if f.has(name):
                    f.number(name)
            for name in ("completed", "input_tokens"):
                if f.has(name):
                    f.whole(name)
            if f.has("file"):
                f.text("file")
        for key, gate in found["gates"].items():
            f = _server_fields(gate, f"{where}, gate of {key}")
            f.whole("exit_code")
            f.text("statement")

    def require_this_machine(self) -> None:
        """Raises CannotTest where the file's points were measured on another, or with others."""
        now = _machine()
        for name, value in self.data["machine"].items():
            if now.get(name, value) != value:
                raise CannotTest(
                    f"--out {self.path}, machine, {name}",
                    expected=value,
                    found=now[name],
                    remedy=_REMEDY,
                )

    @property
    def again(self) -> dict[str, Any]:
        """The base's second turn, which is due as soon as another setting has been measured."""
        found: dict[str, Any] = self.data.get("again", {})
        return found

    def missing(self, points: Sequence[Point]) -> list[Point]:
        return [point for point in points if point.key not in self.data["points"]]

    def due_again(self, points: Sequence[Point]) -> list[Point]:
        """Points of the base that wait for their second turn."""
        return [p for p in points if "again" in self.data and p.key not in self.again]

    def passed(self, setting: Setting) -> bool:
        """Whether the setting needs no gate, or has passed one."""
        gate = self.data["gates"].get(setting.key)
        return setting.algorithm == "none" or (gate is not None and gate["exit_code"] == 0)

    def keep_gate(self, setting: Setting, result: Result) -> None:
        from sglang_ext.lossless.report import statement

        self.data["gates"][setting.key] = {
            **asdict(setting),
            "exit_code": result.exit_code,
            "statement": statement(result),
            "outcomes": [
                {"name": o.name, "state": str(o.state), "shown": o.shown} for o in result.outcomes
            ],
        }
        self._save()

    def keep_point(self, point: Point, figures: dict[str, Any], part: str = "points") -> None:
        if point.setting.algorithm != "none":
            # A second turn before this point says nothing about it.
            self.data["again"] = {}
        self.data[part][point.key] = {
            **asdict(point.setting),
            "dataset": point.dataset.name,
            "file": point.dataset.path,
            "concurrency": point.concurrency,
            "load_average": os.getloadavg()[0],
            **figures,
        }
        self._save()

    def _save(self) -> None:
        """Whole or not at all."""
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)

    def ratios(self) -> list[dict[str, Any]]:
        """Every point with its tokens per second against the same load without speculation.

        What that load reached is the mean of its two turns, before and after all other settings.
        server, data: what to call its setting and its data set beside the others of the file
        """
        points = list(averaged(self.data["points"], self.again).values())
        base = {
            (p["dataset"], p["file"], p["concurrency"]): p["output_tokens_per_second"]
            for p in points
            if p["algorithm"] == "none"
        }
        rows = []
        for point in points:
            without = base.get((point["dataset"], point["file"], point["concurrency"]))
            speed = point["output_tokens_per_second"]
            ratio = speed / without if without and speed else None
            names = {"server": server_name(point, points), "data": _data(point, points)}
            rows.append({**point, **names, "ratio": ratio})
        return rows

    def unsteady(self) -> str:
        """What speaks against the ratios: other work on the machine, or a machine that drifts."""
        found = []
        busy = self.loads()
        if busy and max(busy) >= 1.5 * min(busy) and max(busy) > self.data["machine"]["cpus"]:
            found.append(
                f"The machine was busier at some points than at others (load {min(busy):.1f} to "
                f"{max(busy):.1f}): the ratios say little, measure again on an idle one."
            )
        least, most = self._drift()
        if max(-least, most) > _STEADY:
            found.append(
                f"Measured again at the end, speeds without speculation had changed by {least:+.0%}"
                f" to {most:+.0%}: ratios are against the mean, and no surer than that."
            )
        return " ".join(found)

    def loads(self) -> list[float]:
        """The machine's load at every measurement, both turns of the base included."""
        return [p["load_average"] for p in (*self.data["points"].values(), *self.again.values())]

    def _drift(self) -> tuple[float, float]:
        """Least and most relative change of the base from its first turn to its second."""
        first = self.data["points"]
        changes = [
            p["output_tokens_per_second"] / first[key]["output_tokens_per_second"] - 1
            for key, p in self.again.items()
            if key in first and first[key]["output_tokens_per_second"]
        ]
        return min(changes, default=0.0), max(changes, default=0.0)


def _server_fields(raw: Any, where: str) -> Fields:
    f = Fields(raw, where, None)
    f.text("algorithm")
    for name, read in (("draft", f.text), ("gamma", f.whole)):
        if name not in f.raw:
            raise f.error(name, "a value or null", "nothing")
        if f.has(name):
            read(name)
    return f


def server_name(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The setting; its draft only where the algorithm has been run with several."""
    name = str(row["algorithm"]) + ("" if row["gamma"] is None else f", {row['gamma']} drafts")
    drafts = {other["draft"] for other in rows if other["algorithm"] == row["algorithm"]}
    return name if len(drafts) == 1 else f"{name}, {row['draft']}"


def _data(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The data set; its file only where several have had the name."""
    files = {other["file"] for other in rows if other["dataset"] == row["dataset"]}
    return str(row["dataset"]) if len(files) == 1 else f"{row['dataset']}={row['file']}"


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    device = "CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name()
    return {
        "device": device,
        "processor": platform.processor() or platform.machine(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "sglang": version("sglang"),
        "sglang_ext": version("sglang-ext"),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    """The processor as the system names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
