"""`demo:target`, `demo:dspark`, `demo:dflash`: the built-in checkpoints, made when first asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sglang_ext.launcher.compose import Launch
from sglang_ext.launcher.errors import ConfigError, nearest

PREFIX = "demo:"
NAMES = ("target", "dspark", "dflash")


def resolve_demo(launch: Launch, prepare: Callable[[], dict[str, str]]) -> Launch:
    """The launch with the built-in model's names replaced by directories.

    prepare: makes the checkpoints and names their directories; only called when one is needed

    Raises:
        ConfigError: a name that is none of the built-in ones.
    """
    needs = {k: str(v).removeprefix(PREFIX) for k, v in launch.flags.items() if _is_demo(v)}
    if not needs:
        return launch
    for key, name in needs.items():
        if name not in NAMES:
            raise ConfigError(
                launch.preset.name,
                f"--{key}",
                expected=f"one of {', '.join(PREFIX + known for known in NAMES)}",
                found=PREFIX + name,
                remedy=nearest(name, NAMES) or "Name one of them.",
            )
    paths = prepare()
    return replace(launch, flags={**launch.flags, **{k: paths[n] for k, n in needs.items()}})


def _is_demo(value: object) -> bool:
    return str(value).startswith(PREFIX)


def demo_paths() -> dict[str, str]:
    """Directories of the built-in model, made on first use (a 93 MB download)."""
    from sglang_ext.demo.prepare import paths_as_dict, prepare

    return paths_as_dict(prepare())


def demo_folder_names() -> dict[str, str]:
    """Where they are or would be, without making anything: what a dry run prints."""
    from sglang_ext.env import CACHE_DIR

    root: Path = CACHE_DIR.get() / "demo"
    return {name: str(root / name) for name in NAMES}
