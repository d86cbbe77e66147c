"""Decides whether `sgl_kernel` needs a stand-in and installs it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from sglang_ext.srt.sgl_kernel_torch import stand_in
from sglang_ext.srt.sgl_kernel_torch.ops import define_missing_ops


@dataclass(frozen=True)
class Report:
    """What `install` did.

    Attributes:
        stand_in: whether the real library failed to import and was replaced.
        reason: why it failed; empty if it did not.
        functions: Python functions of `sgl_kernel.*` with a torch implementation.
        ops: names under `torch.ops.sgl_kernel` that were defined.
        lazy: modules whose other names raise `NotImplementedError` when called.
    """

    stand_in: bool
    reason: str
    functions: tuple[str, ...]
    ops: tuple[str, ...]
    lazy: tuple[str, ...]


_report: Report | None = None


def _why_it_fails() -> str:
    """Imports the real library; returns the cause of the failure, or nothing."""
    try:
        importlib.import_module(stand_in.PACKAGE)
    except Exception as error:
        return _last_line_with_cause(str(error)) or type(error).__name__
    return ""


def _last_line_with_cause(message: str) -> str:
    """The loader lists every attempt; the first one names the missing shared library."""
    causes = [line.strip(" -") for line in message.splitlines() if "Error: " in line]
    return (causes or message.strip().splitlines() or [""])[0]


def _forget_partial_import() -> None:
    prefix = stand_in.PACKAGE + "."
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        del sys.modules[name]


def install() -> Report:
    """Makes `import sgl_kernel` and `torch.ops.sgl_kernel.*` work on a machine without CUDA.

    A real library that imports stays in place; the ops that it lacks (it has no CPU kernels) are
    defined all the same. Calling again returns the first report. Imports nothing from `sglang`.
    """
    global _report
    if _report is not None:
        return _report
    reason = _why_it_fails()
    if reason:
        _forget_partial_import()
        stand_in.put_in_place(reason)
    ops = define_missing_ops()
    _report = Report(
        stand_in=bool(reason),
        reason=reason,
        functions=stand_in.supplied_functions() if reason else (),
        ops=ops,
        lazy=stand_in.lazy_modules() if reason else (),
    )
    return _report
