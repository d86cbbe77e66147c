"""Every model file of SGLang imports on a machine without CUDA, but for a known few."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WITHOUT_CONVOLUTION = (
    "needs causal_conv1d_fn from sglang.srt.layers.attention.mamba.mamba, which binds the name on "
    "CUDA, NPU and XPU only and takes nothing from sgl_kernel on a CPU"
)
CANNOT_IMPORT = {
    "sglang.srt.models.falcon_mamba": WITHOUT_CONVOLUTION,
    "sglang.srt.models.mamba": WITHOUT_CONVOLUTION,
}

# The scheduler comes first, as in a server: some models import it in a circle.
IMPORT_ALL = """
import importlib, json, logging, pkgutil, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import sglang.srt.managers.scheduler
import sglang.srt.models
from sglang.srt.models.registry import ModelRegistry
failures, modules = {}, 0
for module in pkgutil.walk_packages(sglang.srt.models.__path__, "sglang.srt.models."):
    modules += 1
    try:
        importlib.import_module(module.name)
    except Exception as error:
        failures[module.name] = f"{type(error).__name__}: {error}"
architectures = set()
for name, module in list(sys.modules.items()):
    if name.startswith("sglang.srt.models."):
        entry = getattr(module, "EntryClass", [])
        entries = entry if isinstance(entry, (list, tuple)) else [entry]
        architectures.update(cls.__name__ for cls in entries)
unregistered = sorted(architectures - set(ModelRegistry.models))
print(json.dumps([modules, failures, unregistered]), file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def imported() -> tuple[int, dict[str, str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    modules, failures, unregistered = json.loads(done.stdout.splitlines()[-1])
    return modules, failures, unregistered


def test_only_the_known_modules_fail(imported: tuple[int, dict[str, str], list[str]]) -> None:
    modules, failures, _ = imported
    assert modules > 250
    assert failures.keys() == CANNOT_IMPORT.keys(), json.dumps(failures, indent=1)


def test_the_known_modules_fail_for_the_known_reason(
    imported: tuple[int, dict[str, str], list[str]],
) -> None:
    _, failures, _ = imported
    for message in failures.values():
        assert "cannot import name 'causal_conv1d_fn'" in message


def test_every_architecture_of_an_imported_module_is_registered(
    imported: tuple[int, dict[str, str], list[str]],
) -> None:
    _, _, unregistered = imported
    assert unregistered == []
