"""`demo:target`, `demo:dspark`, `demo:dflash`: the built-in checkpoints, made when first asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sglang_ext.launcher.compose import Launch

PREFIX = "demo:"


def resolve_demo(launch: Launch, prepare: Callable[[], dict[str, str]]) -> Launch:
    """The launch with the built-in model's names replaced by directories.

    prepare: makes the checkpoints and names their directories; only called when one is needed
    """
    needs = [k for k, v in launch.flags.items() if str(v).startswith(PREFIX)]
    if not needs:
        return launch
    paths = prepare()
    found = {key: paths[str(launch.flags[key]).removeprefix(PREFIX)] for key in needs}
    return replace(launch, flags={**launch.flags, **found})


def demo_paths() -> dict[str, str]:
    """Directories of the built-in model, made on first use (a 93 MB download)."""
    from sglang_ext.demo.prepare import paths_as_dict, prepare

    return paths_as_dict(prepare())


def demo_folder_names() -> dict[str, str]:
    """Where they are or would be, without making anything: what a dry run prints."""
    from sglang_ext.env import CACHE_DIR

    root: Path = CACHE_DIR.get() / "demo"
    return {name: str(root / name) for name in ("target", "dspark", "dflash")}
