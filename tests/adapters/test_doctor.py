"""`sglang-ext doctor`: sees everything, and fails closed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from sglang_ext import doctor, patches
from sglang_ext.cli import app
from sglang_ext.doctor import machine, serving
from sglang_ext.doctor.report import Check, Report, guarded


@pytest.fixture(scope="module")
def report() -> Report:
    return doctor.examine()


def test_names_every_hook_with_its_state(report: Report) -> None:
    assert [row["name"] for row in report.ledger] == [patch.name for patch in patches.LEDGER]
    assert {row["state"] for row in report.ledger} <= {"in force", "later", "unused here"}
    assert any(row["state"] == "in force" for row in report.ledger)


def test_says_whose_code_answers(report: Report) -> None:
    algorithms = {r["name"] for r in report.answers if r["kind"] == "algorithm"}
    assert algorithms == set(serving.ALGORITHMS)
    models = {r["name"]: r["why"] for r in report.answers if r["kind"] == "model"}
    assert set(models) == {*serving.MODELS, "every other"}
    for name in serving.MODELS:
        assert f"{name} ({models[name]})" in report.as_text()


def test_names_every_kernel(report: Report) -> None:
    assert {"attention", "linear", "moe"} <= {row["name"] for row in report.kernels}
    assert {row["runs"] for row in report.kernels} <= {"torch", "triton"}


def test_text_and_json_say_the_same(report: Report) -> None:
    found = json.loads(report.as_json())
    assert found["healthy"] is report.healthy
    text = report.as_text()
    for check in found["checks"]:
        assert check["name"] in text
    for row in found["ledger"]:
        assert row["target"] in text


def test_healthy_here(report: Report) -> None:
    assert report.healthy, [c for c in report.checks if c.state == "fail"]


def test_a_bad_variable_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_SCHEDULER", "later")
    monkeypatch.setenv("SGLANG_EXT_SHCEDULER", "off")
    found = {check.name: check for check in serving.variables()}
    assert found["SGLANG_EXT_SCHEDULER"].state == "fail"
    assert "expected sync, async or off" in found["SGLANG_EXT_SCHEDULER"].remedy
    assert found["SGLANG_EXT_SHCEDULER"].found == "set, but no variable of this version"


@pytest.mark.parametrize("cuda", [False, True])
def test_without_our_platform_a_gpu_is_needed(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    monkeypatch.setenv("SGLANG_EXT_PLATFORM", "off")
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    (check,) = serving.platform()
    assert check.state == ("ok" if cuda else "fail")
    assert ("Unset SGLANG_EXT_PLATFORM" in check.remedy) is not cuda


def test_a_moved_target_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = patches.LEDGER
    moved = dataclasses.replace(first, signature="(something, else)")
    monkeypatch.setattr(patches, "LEDGER", (moved, *rest))
    entries, checks = serving.ledger()
    assert entries[0]["state"] == "moved"
    assert [check.state for check in checks] == ["fail"]


def test_another_sglang_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.PINNED, "sglang", "0.0.1")
    report = doctor.examine()
    assert not report.healthy
    failed = next(check for check in report.checks if check.state == "fail")
    assert failed.remedy == "pip install sglang==0.0.1"


def test_what_cannot_be_examined_is_a_failure() -> None:
    def broken() -> list[Check]:
        raise OSError("no such device")

    def stopped() -> list[Check]:
        raise SystemExit("a target has moved\nInstall another version.")

    assert guarded("device", broken) == [
        Check("device", "fail", "OSError: no such device", "Could not be examined.")
    ]
    assert guarded("plugin", stopped)[0].state == "fail"


@pytest.mark.parametrize("look", ["ledger", "answers", "kernels"])
def test_what_raises_is_in_the_report(monkeypatch: pytest.MonkeyPatch, look: str) -> None:
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(serving, look, broken)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    failed = [c for c in json.loads(result.output)["checks"] if c["state"] == "fail"]
    assert [c["found"] for c in failed] == ["OSError: no such thing"]


def test_a_platform_that_is_none_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_PLATFORM", "foo")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    checks = {c["name"]: c for c in json.loads(result.stdout)["checks"]}
    assert "expected auto, cpu or off" in checks["SGLANG_EXT_PLATFORM"]["remedy"]


def test_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, code in (("note", 0), ("fail", 1)):
        report = Report([Check("x", state, "y")])
        monkeypatch.setattr(doctor, "examine", lambda report=report: report)
        result = CliRunner().invoke(app, ["doctor", "--json"])
        assert result.exit_code == code
        assert json.loads(result.output)["healthy"] is (code == 0)
