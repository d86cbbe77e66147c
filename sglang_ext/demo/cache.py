"""Directories that are built whole or not at all, and noticed when damaged."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_MARKER = ".complete.json"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_complete(directory: Path, recipe: str) -> bool:
    """Whether `directory` was built by `recipe` and every file still has the recorded contents."""
    try:
        marker = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        recorded: dict[str, str] = marker["files"]
        if marker["recipe"] != recipe or not recorded:
            return False
        return all(file_sha256(directory / name) == digest for name, digest in recorded.items())
    except (OSError, ValueError, KeyError):
        return False


def build(directory: Path, recipe: str, fill: Callable[[Path], None]) -> Path:
    """Make `directory` with `fill`, unless it is already complete; return it.

    The work is done in a sibling directory that is renamed at the end, with a marker holding the
    recipe and a hash of every file: a build that was cut short, or a file changed since, is
    noticed and built again.
    """
    if is_complete(directory, recipe):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        scratch.chmod(0o755)
        fill(scratch)
        files = sorted(path for path in scratch.rglob("*") if path.is_file())
        for path in files:
            path.chmod(0o644)
        hashes = {str(path.relative_to(scratch)): file_sha256(path) for path in files}
        marker = json.dumps({"recipe": recipe, "files": hashes}, indent=2)
        (scratch / _MARKER).write_text(marker + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory` for this process; others wait."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
