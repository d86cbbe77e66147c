"""The ledger and the patches say the same, and a target that has moved stops the start."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

from sglang_ext import patches
from sglang_ext.patches import LEDGER, MovedTargetError, Patch, Stage, ledger, selected
from sglang_ext.patches.ledger import PINNED_SGLANG, Kind, Where, moved, observed_signature, verify

_MACHINERY = {"ledger", "hooks"}


def _modules() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(patches.__path__) if m.name not in _MACHINERY]


def _declared() -> list[Patch]:
    found: list[Patch] = []
    for name in _modules():
        module = importlib.import_module(f"sglang_ext.patches.{name}")
        found += [value for value in vars(module).values() if isinstance(value, Patch)]
    return found


def test_every_declared_patch_is_listed_and_the_reverse() -> None:
    declared, listed = _declared(), list(LEDGER)
    assert {id(p) for p in declared} == {id(p) for p in listed}
    assert len(declared) == len(listed)


def test_every_module_declares_a_patch() -> None:
    for name in _modules():
        module = importlib.import_module(f"sglang_ext.patches.{name}")
        assert any(isinstance(value, Patch) for value in vars(module).values()), name


def test_names_are_unique() -> None:
    names = [p.name for p in LEDGER]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("patch", LEDGER, ids=lambda p: p.name)
def test_entry_is_complete(patch: Patch) -> None:
    for field in dataclasses.fields(patch):
        value = getattr(patch, field.name)
        assert not isinstance(value, str) or value.strip(), field.name
    assert patch.upstream.startswith("https://github.com/sgl-project/sglang")
    assert ":" in patch.target
    assert inspect.signature(patch.apply).parameters == {}


@pytest.mark.parametrize("patch", LEDGER, ids=lambda p: p.name)
def test_target_is_as_recorded(patch: Patch) -> None:
    assert observed_signature(patch.target) == patch.signature


def test_pin_is_the_installed_version() -> None:
    import sglang

    assert sglang.__version__ == PINNED_SGLANG


def test_selection_by_machine_and_stage() -> None:
    for stage in Stage:
        everywhere = selected(portable_cpu=False, stage=stage)
        on_cpu = selected(portable_cpu=True, stage=stage)
        assert all(p.where is Where.ANY for p in everywhere)
        assert set(map(id, everywhere)) <= set(map(id, on_cpu))
    all_stages = [p for stage in Stage for p in selected(portable_cpu=True, stage=stage)]
    assert {p.name for p in all_stages} == {p.name for p in LEDGER}


def _moved_patch(**changes: str) -> Patch:
    return dataclasses.replace(LEDGER[0], name="moved-for-a-test", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"signature": "(something, else)"},
        {"target": "sglang.srt.server_args:no_such_function"},
        {"target": "sglang.srt.no_such_module:f"},
    ],
    ids=["signature", "attribute", "module"],
)
def test_moved_target_names_the_entry(changes: dict[str, str]) -> None:
    patch = _moved_patch(**changes)
    assert len(moved([*LEDGER, patch])) == 1
    with pytest.raises(MovedTargetError, match="moved-for-a-test") as raised:
        verify([*LEDGER, patch])
    assert PINNED_SGLANG in str(raised.value)


def test_moved_target_stops_the_process() -> None:
    """SGLang swallows an Exception of a plugin; this one must get through."""
    code = (
        "import dataclasses, sglang_ext.patches as p\n"
        "p.LEDGER = (*p.LEDGER, dataclasses.replace(\n"
        "    p.LEDGER[0], name='moved-for-a-test', signature='(something, else)'))\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "moved-for-a-test" in done.stderr
    assert "went on" not in done.stdout


def test_hooks_take_effect_in_a_fresh_process() -> None:
    """After SGLang's own plugin loading every hooked function is the patched one."""
    targets = [
        p.target.replace(":", ".")
        for p in selected(portable_cpu=True, stage=Stage.LAUNCH)
        if p.kind in (Kind.REPLACE, Kind.AROUND, Kind.AFTER)
    ]
    code = (
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from sglang_ext.patches import applied\n"
        f"missing = [t for t in {targets!r} if t not in HookRegistry._patched]\n"
        "assert not missing, missing\n"
        "print(len(applied()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = len(selected(portable_cpu=True, stage=Stage.LAUNCH))
    assert int(done.stdout.split()[-1]) == expected


def test_applying_twice_changes_nothing() -> None:
    before = ledger.observed_signature(LEDGER[0].target)
    patches.apply_all(portable_cpu=True)
    first = patches.applied()
    patches.apply_all(portable_cpu=True)
    assert patches.applied() == first
    assert ledger.observed_signature(LEDGER[0].target) == before
