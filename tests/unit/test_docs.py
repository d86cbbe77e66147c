"""Pages say what the commands print and the rules are called today."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.launcher import catalog
from sglang_ext.launcher.emit import WRITERS
from sglang_ext.launcher.rules import ERRORS
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.numbers import DEFAULT
from sglang_ext.planner.tables import TABLES
from sglang_ext.planner.validate import KNOWN

DOCS = Path(__file__).parents[2] / "docs"
# `$ sglang-ext ...` and what it printed, to the end of the block.
PRINTED = [
    (page.name, command, said)
    for page in sorted(DOCS.glob("*.md"))
    for command, said in re.findall(
        r"^```\n\$ sglang-ext ([^\n]*)\n(.*?)\n```$", page.read_text(encoding="utf-8"), re.M | re.S
    )
]


def test_there_are_such_blocks() -> None:
    assert PRINTED


@pytest.mark.parametrize(("page", "command", "said"), PRINTED, ids=[c for _, c, _ in PRINTED])
def test_a_command_prints_what_its_page_says(page: str, command: str, said: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.output.rstrip("\n") == said


def test_the_picture_is_what_its_command_draws(tmp_path: Path) -> None:
    page = (DOCS / "planner.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^sglang-ext (plan .*) --preset \S+ --picture \S+", page, re.M)
    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(app, [*shlex.split(command), "--picture", str(drawn)])
    assert result.exit_code == 0, result.output
    assert drawn.read_text() == (DOCS / "planner-layout.svg").read_text()


def test_the_launchers_page_names_every_rule_and_no_other_part() -> None:
    page = (DOCS / "launcher.md").read_text(encoding="utf-8")
    missing = [r.__name__ for r in ERRORS if f"`{r.__name__.replace('_', '-')}`" not in page]
    assert not missing
    named = re.findall(r"parts: \[([^\]]*)\]", page)
    assert named
    assert {part for group in named for part in group.split(", ")} <= set(catalog.names("parts"))


def _table(page: str, head: str) -> dict[str, str]:
    """First column -> the rest, of the table whose first heading is `head`."""
    _, _, after = (DOCS / page).read_text(encoding="utf-8").partition(f"\n| {head} |")
    rows = after.partition("\n\n")[0].splitlines()[2:]
    return {row.split(" | ")[0].strip("| "): " | ".join(row.split(" | ")[1:]) for row in rows}


def _names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_launchers_page_names_every_field_and_status_of_a_preset() -> None:
    rows = _table("launcher.md", "field")
    assert _names(" ".join(rows)) == {f.name for f in fields(catalog.Preset)} - {"name"}
    assert _names(rows["`status`"]) == set(catalog.STATUSES)
    page = (DOCS / "launcher.md").read_text(encoding="utf-8")
    points = re.search(r"Points: ([^.]*)\.", page)
    assert points is not None
    assert _names(points[1]) == set(catalog.POINTS)


def test_the_launchers_page_names_every_kind_of_file() -> None:
    assert _names(" ".join(_table("launcher.md", "`--emit`"))) == set(WRITERS)


def test_the_planners_page_names_every_field_of_a_result_and_every_table() -> None:
    rows = _table("planner.md", "field")
    assert _names(" ".join(rows)) == set(KNOWN)
    sizes = {f.name for f in fields(Layout)}
    assert _names(rows["`layout`"]) - sizes <= {"deepep", "dspark", "dflash"}
    assert sizes <= _names(rows["`layout`"])
    page = (DOCS / "planner.md").read_text(encoding="utf-8")
    assert f"# {', '.join(TABLES)}\n" in page


def test_the_planners_page_states_its_assumptions() -> None:
    page = (DOCS / "planner.md").read_text(encoding="utf-8")
    assert f"({DEFAULT.memory:g} of HBM, {DEFAULT.compute:g} of FLOP, {DEFAULT.link:g}" in page
    local, remote = DEFAULT.local * 1e6, DEFAULT.remote * 1e6
    assert f"({local:g} us inside a node, {remote:g} us across)" in page
    assert f"{DEFAULT.step * 1e3:g} ms of host time per step" in page
    assert f"at most {DEFAULT.balanced:g} times" in page
