"""Imports go down only: core < kernels < srt; SGLang is imported in srt alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "sglang_ext"
FILES = [f for f in ROOT.rglob("*.py") if "assets" not in f.parts]

FORBIDDEN = {
    "core": ("sglang", "triton", "transformers", "sglang_ext.kernels", "sglang_ext.srt"),
    "kernels": ("sglang", "transformers", "sglang_ext.srt"),
    "training": ("sglang", "sglang_ext.srt"),
    "demo": ("sglang", "sglang_ext.srt"),
    "launcher": ("sglang", "torch", "sglang_ext.kernels", "sglang_ext.srt"),
    "planner": ("sglang", "torch", "sglang_ext.kernels", "sglang_ext.srt"),
    "lossless": ("sglang", "sglang_ext.srt", "torch"),
    "calibrate": ("sglang", "sglang_ext.srt"),
    "bench_cli": ("sglang", "sglang_ext.srt"),
}
# The thin files at the top may reach into SGLang inside a function, never at import.
TOP = ("plugin.py", "doctor/__init__.py", "doctor/serving.py", "cli.py", "env.py")


def _imports(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def _crosses(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file: Path) -> None:
    layer = file.relative_to(ROOT).parts[0]
    found = _imports(ast.parse(file.read_text()))
    bad = [n for n in found for p in FORBIDDEN.get(layer, ()) if _crosses(n, p)]
    assert not bad, f"{layer} must not import {bad}"


@pytest.mark.parametrize("name", TOP)
def test_top_level_files_import_sglang_lazily(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    at_import = [n for node in outside for n in _imports(node)]
    assert not [n for n in at_import if _crosses(n, "sglang")]


def test_platform_module_imports_only_what_is_safe_while_sglang_is_half_loaded() -> None:
    tree = ast.parse((ROOT / "srt" / "platform.py").read_text())
    found = [n for node in tree.body if not isinstance(node, ast.ClassDef) for n in _imports(node)]
    sglang = [n for n in found if _crosses(n, "sglang")]
    assert all(n.startswith("sglang.srt.platforms.") for n in sglang)
