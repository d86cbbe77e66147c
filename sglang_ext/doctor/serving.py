"""SGLang with our changes in this process: platform, hooks, and whose code answers for what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_ext import env
from sglang_ext.doctor.report import Check

ALGORITHMS = ("DSPARK", "DFLASH", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
MODELS = ("DeepseekV4ForCausalLM", "DeepseekV32ForCausalLM")
# The first found of each op's implementations that is not its reference.
_FILES = ("triton", "torch")


def variables() -> Iterator[Check]:
    for variable in env.ALL:
        try:
            value = variable.get()
        except env.EnvError as error:
            yield Check(variable.name, "fail", os.environ[variable.name], str(error))
            continue
        if variable.is_set():
            yield Check(variable.name, "note", f"{value} (set)")
    known = {variable.name for variable in env.ALL}
    for name in sorted(os.environ):
        ours = name.startswith("SGLANG_EXT_") and not name.startswith("SGLANG_EXT_TEST_")
        if ours and name not in known:
            yield Check(name, "note", "set, but no variable of this version")


def hooks() -> Iterator[Check]:
    """Apply what a server process applies at its start; a hook whose target moved stops it."""
    from sglang.srt.plugins import load_plugins

    from sglang_ext.patches import Stage, applied, selected
    from sglang_ext.plugin import wants_portable_cpu

    load_plugins()
    wanted = selected(portable_cpu=wants_portable_cpu(), stage=Stage.LAUNCH)
    missing = [patch.name for patch in wanted if patch not in applied()]
    if missing:
        yield Check(
            "plugin",
            "fail",
            f"SGLang did not apply: {', '.join(missing)}",
            "Look for 'plugin' in the log above; unset SGLANG_PLUGINS, or add sglang_ext to it.",
        )
    else:
        yield Check("plugin", "ok", f"loaded; {len(wanted)} changes applied at start-up")


def platform() -> Iterator[Check]:
    from sglang_ext.plugin import wants_portable_cpu

    if not wants_portable_cpu():
        yield _own_device()
        return
    from sglang.srt.platforms import current_platform

    name = type(current_platform).__name__
    ours = name == "PortableCpuPlatform"
    remedy = "Another platform plugin won; set SGLANG_PLATFORM=sglang_ext."
    yield Check("platform", "ok" if ours else "fail", name, "" if ours else remedy)
    from sglang_ext.srt.sgl_kernel_torch import install

    report = install()
    if not report.stand_in:
        yield Check("sgl_kernel", "ok", "SGLang's own library")
        return
    found = f"torch stand-in, {len(report.functions)} functions, {len(report.ops)} ops"
    yield Check("sgl_kernel", "ok", f"{found} ({report.reason})")


def _own_device() -> Check:
    """What SGLang runs on where our platform is off: by itself it needs a GPU."""
    import torch

    if torch.cuda.is_available():
        return Check("platform", "ok", "SGLang's own (CUDA)")
    name = env.PLATFORM.name
    found = f"{name}={env.PLATFORM.get()}, and no CUDA GPU is usable"
    return Check("platform", "fail", found, f"Unset {name}, or set it to auto or cpu.")


def ledger() -> tuple[list[dict[str, Any]], list[Check]]:
    """Every change to SGLang and its state, and a failed check for each that has moved."""
    from sglang_ext.patches import LEDGER, applied
    from sglang_ext.patches.ledger import moved
    from sglang_ext.plugin import wants_portable_cpu

    entries, checks, cpu = [], [], wants_portable_cpu()
    for patch in LEDGER:
        problem = moved([patch])
        applies = cpu or patch.where.value == "any device"
        if problem:
            state = "moved"
        elif not applies:
            state = "unused here"
        else:
            state = "in force" if patch in applied() else "later"
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
            remedy = "pip install sglang==0.5.23"
            checks.append(Check(f"patch {patch.name}", "fail", problem[0], remedy))
    return entries, checks


def answers() -> list[dict[str, str]]:
    """Who serves each algorithm and each model architecture that we could serve, and why."""
    import torch

    choice, cuda = env.SPEC.get(), torch.cuda.is_available()
    rows = []
    for name in ALGORITHMS:
        ours = name in ("DSPARK", "DFLASH") and choice != "never"
        if ours and choice == "auto" and cuda:
            who = "depends"
            why = "SGLang's where it accepts the configuration, else ours"
        else:
            who = "ours" if ours and (choice == "always" or not cuda) else "SGLang's"
            why = ""
        rows.append({"kind": "algorithm", "name": name, "who": who, "why": why})
    return rows + _models()


def _models() -> list[dict[str, str]]:
    """The two architectures that SGLANG_EXT_MODELS decides about, where this version has them."""
    from sglang_ext.srt.models import policy
    from sglang_ext.srt.models.claims import CLAIMS, wanted

    claimed = {claim.official for claim in CLAIMS} if wanted() else set()
    why = policy.reason(env.MODELS.get(), policy.this_machine())
    rows = [
        {
            "kind": "model",
            "name": name,
            "who": "ours" if name in claimed else "SGLang's",
            "why": why,
        }
        for name in MODELS
    ]
    return [*rows, {"kind": "model", "name": "every other", "who": "SGLang's", "why": ""}]


def kernels() -> list[dict[str, str]]:
    """Each op with the implementations it has, and the one that `auto` takes on this device."""
    import torch

    from sglang_ext import kernels as package
    from sglang_ext.kernels.choice import runs_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for folder in sorted(Path(str(package.__file__)).parent.iterdir()):
        if not (folder / "api.py").is_file():
            continue
        files = {file.stem for file in folder.glob("*.py")}
        has = [name for name in _FILES if any(stem.startswith(name) for stem in files)]
        triton = "triton" in has and runs_triton(folder.name, "auto", device)
        if "torch" not in has and "reference" not in files:
            has.append("torch")
        runs = "triton" if triton else "torch"
        kinds = [*has, *(["reference"] if "reference" in files else [])]
        rows.append({"name": folder.name, "runs": runs, "has": ", ".join(kinds)})
    return rows
