"""The cache: builds are whole or absent, damage is noticed, a second call does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.demo.cache import build, is_complete


def write(out: Path) -> None:
    (out / "weights").write_bytes(b"12345")
    (out / "sub").mkdir()
    (out / "sub" / "config").write_text("{}")


def refuse(out: Path) -> None:
    raise AssertionError("built again")


def test_a_build_is_done_once(tmp_path: Path) -> None:
    made = build(tmp_path / "model", "recipe 1", write)
    assert (made / "sub" / "config").read_text() == "{}"
    assert build(tmp_path / "model", "recipe 1", refuse) == made


@pytest.mark.parametrize("damage", ["changed", "missing", "no marker", "broken marker"])
def test_damage_is_repaired(tmp_path: Path, damage: str) -> None:
    made = build(tmp_path / "model", "recipe 1", write)
    marker = made / ".complete.json"
    if damage == "changed":
        (made / "weights").write_bytes(b"54321")
    elif damage == "missing":
        (made / "weights").unlink()
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text(marker.read_text()[:-9])
    assert not is_complete(made, "recipe 1")
    build(made, "recipe 1", write)
    assert is_complete(made, "recipe 1")
    assert (made / "weights").read_bytes() == b"12345"


def test_another_recipe_builds_again(tmp_path: Path) -> None:
    made = build(tmp_path / "model", "recipe 1", write)
    assert not is_complete(made, "recipe 2")


def test_a_failed_build_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    made = build(tmp_path / "model", "recipe 1", write)

    def fail(out: Path) -> None:
        (out / "weights").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(made, "recipe 2", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert is_complete(made, "recipe 1")
