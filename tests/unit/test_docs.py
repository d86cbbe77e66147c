"""Pages say what the commands print and the rules are called today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.launcher import catalog
from sglang_ext.launcher.rules import ERRORS

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
