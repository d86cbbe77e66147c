"""What a change to SGLang is, on paper: the record each patch carries and the check at start-up.

A `Patch` names the object it depends on and the signature it was written against. `verify` holds
every record against the SGLang that is installed and stops the process when one has moved.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PINNED_SGLANG = "0.5.23"


class Kind(StrEnum):
    """How a patch reaches its target."""

    REPLACE = "replace"
    AROUND = "around"
    AFTER = "after"
    RESOLUTION = "resolution hook"
    REGISTER = "registration"
    ADD = "added attribute"


class Stage(StrEnum):
    """When a patch is applied."""

    LAUNCH = "every process, before arguments are read"
    BACKEND = "model ranks, when our platform's backend starts or a model of ours is claimed"
    CONTROLLER = "the process that spreads requests over DP ranks, when it is ready"
    WORKER = "model ranks, when our speculative worker is built"


class Where(StrEnum):
    """On which machines a patch is applied."""

    CPU = "portable CPU"
    ANY = "any device"


@dataclass(frozen=True)
class Patch:
    """One change made to SGLang.

    target: `package.module:qualified.name` of the object the change depends on.
    signature: `str(inspect.signature(target))` it was written against; "data" for a plain value.
    until: the event after which the patch can be deleted.
    apply: registers the change; called once per process, after `verify`.
    stage: later than LAUNCH where the target is too costly, or too early, to import in a launcher.
    """

    name: str
    target: str
    kind: Kind
    where: Where
    why: str
    upstream: str
    signature: str
    until: str
    apply: Callable[[], None]
    stage: Stage = Stage.LAUNCH


class MovedTargetError(SystemExit):
    """The installed SGLang differs from the one a patch was written against.

    A `SystemExit`, because SGLang logs and ignores an `Exception` raised by a plugin, and a server
    with half its patches would serve wrong text.
    """


def resolve(target: str) -> Any:
    """The object a target names; raises ImportError or AttributeError."""
    module_name, _, path = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def observed_signature(target: str) -> str:
    """The signature of `target` as installed; "data" for a value; "missing: why" if absent."""
    try:
        found = resolve(target)
    except (ImportError, AttributeError) as error:
        return f"missing: {error}"
    if not callable(found):
        return "data"
    return str(inspect.signature(found))


def moved(patches: Iterable[Patch]) -> list[str]:
    """One line per patch whose target is not as recorded; empty when all is well."""
    lines = []
    for patch in patches:
        found = observed_signature(patch.target)
        if found != patch.signature:
            lines.append(
                f"patch {patch.name!r}: target {patch.target}: "
                f"expected {patch.signature}, found {found}"
            )
    return lines


def verify(patches: Iterable[Patch]) -> None:
    """Raise `MovedTargetError` naming every entry whose target has moved."""
    lines = moved(patches)
    if lines:
        raise MovedTargetError(
            "sglang-ext: the installed SGLang is not the one this version was written for "
            f"(sglang=={PINNED_SGLANG}).\n  "
            + "\n  ".join(lines)
            + f"\nInstall sglang=={PINNED_SGLANG}, or a version of sglang-ext made for yours."
        )
