"""`sglang-ext doctor`: what this machine will run, and what would keep a server from starting."""

from __future__ import annotations

import logging
import warnings

from sglang_ext.doctor import machine
from sglang_ext.doctor.report import Check, Report, guarded


def examine() -> Report:
    """Look at everything; imports SGLang, so it takes some seconds.

    What cannot be examined is a failure: a report never leaves out what it could not look at.
    """
    from sglang_ext.doctor import serving

    _hush()
    checks = guarded("packages", machine.packages) + guarded("device", machine.device)
    checks += guarded("memory", machine.memory) + guarded("ports", machine.ports)
    checks += guarded("variables", serving.variables)
    if any(c.state == "fail" and c.name == "package sglang" for c in checks):
        return Report(checks)
    checks += guarded("platform", serving.platform) + guarded("plugin", serving.hooks)
    report = Report(checks)

    def changes() -> list[Check]:
        found, problems = serving.ledger()
        report.ledger.extend(found)
        return problems

    def who_and_how() -> list[Check]:
        report.answers.extend(serving.answers())
        report.kernels.extend(serving.kernels())
        return []

    checks += guarded("patches", changes)
    if report.healthy:
        checks += guarded("answers and kernels", who_and_how)
    return report


def _hush() -> None:
    """SGLang warns at import of what a machine lacks; the report says what of it matters."""
    warnings.simplefilter("ignore")
    logging.getLogger("sglang").setLevel(logging.ERROR)


__all__ = ["Check", "Report", "examine"]
