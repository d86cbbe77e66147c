"""`sglang-ext doctor`: what this machine will run, and what would keep a server from starting."""

from __future__ import annotations

import json
import os
import platform as machine
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_ext import env

PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "transformers", "safetensors")


@dataclass(frozen=True)
class Check:
    """One line of the report. state: ok, note (worth knowing) or fail (a server cannot start)."""

    name: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All checks and the patch ledger."""

    checks: list[Check]
    ledger: list[dict[str, Any]] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.state != "fail" for check in self.checks)

    def as_json(self) -> str:
        return json.dumps({"healthy": self.healthy, **asdict(self)}, indent=1)

    def as_text(self) -> str:
        """The checks as a table, then the ledger, one line per patch."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{c.state:4}  {c.name:{width}}  {c.found}" for c in self.checks]
        lines += [f"      {'':{width}}  -> {c.remedy}" for c in self.checks if c.remedy]
        lines.append("")
        lines.append("patches (each names what it changes and when it can go):")
        for entry in self.ledger:
            lines.append(f"{entry['state']:8} {entry['name']:24} {entry['target']}")
        return "\n".join(lines)


def _packages() -> list[Check]:
    checks = []
    for name in PACKAGES:
        try:
            found, state, remedy = version(name), "ok", ""
        except PackageNotFoundError:
            found, state, remedy = "not installed", "fail", f"pip install {name}"
        if name == "sglang" and found != "0.5.23":
            state, remedy = "fail", "pip install sglang==0.5.23"
        checks.append(Check(f"package {name}", state, found, remedy))
    return checks


def _device() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        flags = [f for f in ("avx2", "avx512_bf16", "amx_bf16") if f in _cpu_flags()]
        found = f"{machine.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
        return [
            Check("device", "ok", f"CPU ({found})"),
            Check("bf16 matrix units", "ok" if len(flags) > 1 else "note", ", ".join(flags)),
        ]
    capability = torch.cuda.get_device_capability()
    fp8 = capability >= (8, 9)
    return [
        Check("device", "ok", f"CUDA {torch.cuda.get_device_name()}, capability {capability}"),
        Check("fp8", "ok" if fp8 else "note", "native" if fp8 else "none: weights are dequantised"),
    ]


def _cpu_flags() -> str:
    try:
        with open("/proc/cpuinfo") as handle:
            return next((line for line in handle if line.startswith("flags")), "")
    except OSError:
        return ""


def _variables() -> list[Check]:
    checks = []
    for variable in env.ALL:
        try:
            value = variable.get()
        except env.EnvError as error:
            checks.append(Check(variable.name, "fail", os.environ[variable.name], str(error)))
            continue
        if variable.is_set():
            checks.append(Check(variable.name, "note", f"{value} (set)"))
    return checks


def _platform() -> list[Check]:
    from sglang_ext.plugin import wants_portable_cpu

    if not wants_portable_cpu():
        return [Check("platform", "ok", "SGLang's own (CUDA)")]
    from sglang.srt.platforms import current_platform

    name = type(current_platform).__name__
    ours = name == "PortableCpuPlatform"
    return [
        Check(
            "platform",
            "ok" if ours else "fail",
            name,
            "" if ours else "Another platform plugin won; set SGLANG_PLATFORM=sglang_ext.",
        ),
        _kernels(),
    ]


def _kernels() -> Check:
    from sglang_ext.srt.sgl_kernel_torch import install

    report = install()
    if not report.stand_in:
        return Check("sgl_kernel", "ok", "SGLang's own library")
    found = f"torch stand-in, {len(report.functions)} functions, {len(report.ops)} ops"
    return Check("sgl_kernel", "ok", f"{found} ({report.reason})")


def _workers() -> list[Check]:
    import torch

    choice, cuda = env.SPEC.get(), torch.cuda.is_available()
    if choice == "never":
        who = "SGLang's"
    elif choice == "always" or not cuda:
        who = "ours"
    else:
        who = "SGLang's (SGLANG_EXT_SPEC=always: ours)"
    return [Check(f"worker {name}", "ok", who) for name in ("DSPARK", "DFLASH")]


def _ledger() -> tuple[list[dict[str, Any]], list[Check]]:
    from sglang_ext.patches import LEDGER
    from sglang_ext.patches.ledger import moved
    from sglang_ext.plugin import wants_portable_cpu

    entries, checks, cpu = [], [], wants_portable_cpu()
    for patch in LEDGER:
        problem = moved([patch])
        applies = cpu or patch.where.value == "any device"
        state = "moved" if problem else "ok" if applies else "unused"
        entries.append(
            {
                "name": patch.name,
                "state": state,
                "target": patch.target,
                "kind": patch.kind.value,
                "where": patch.where.value,
                "stage": patch.stage.value,
                "why": patch.why,
                "upstream": patch.upstream,
                "until": patch.until,
            }
        )
        if problem and applies:
            checks.append(
                Check(f"patch {patch.name}", "fail", problem[0], "pip install sglang==0.5.23")
            )
    return entries, checks


def examine() -> Report:
    """Look at everything; imports SGLang, so it takes some seconds."""
    checks = _packages() + _device() + _variables()
    if any(c.state == "fail" and c.name == "package sglang" for c in checks):
        return Report(checks)
    checks += _platform() + _workers()
    entries, problems = _ledger()
    return Report(checks + problems, entries)
