"""A result as text on the terminal, JSON, Markdown or HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.lossless.plots import missing, plots
from sglang_ext.lossless.suite import Result
from sglang_ext.lossless.types import Facts, Outcome, State

_STYLE = {
    State.PASS: "green",
    State.FAIL: "bold red",
    State.NOT_SUPPORTED: "yellow",
    State.UNDECIDED: "magenta",
}
_VERDICT = {
    0: "lossless within what was tested",
    1: "NOT lossless: an unexplained difference",
    2: "could not test",
}
NOT_SHOWN = (
    "not shown: other prompts, lengths, batch sizes, samplers and settings than these; streaming, "
    "LoRA, tool calls and multimodal input; differences below the bounds and the power stated"
)


def statement(result: Result) -> str:
    """One line: what was shown and what was not."""
    passed, missing = result.count(State.PASS), result.count(State.NOT_SUPPORTED)
    parts = [f"{passed} of {len(result.outcomes)} checks passed"]
    if missing:
        names = [o.name for o in result.outcomes if o.state is State.NOT_SUPPORTED]
        parts.append(f"not supported, so not shown: {', '.join(names)}")
    return f"{_VERDICT[result.exit_code]} ({'; '.join(parts)}); {NOT_SHOWN}"


def as_json(result: Result) -> str:
    """Everything that was found, one JSON object."""
    return json.dumps(
        {
            "verdict": _VERDICT[result.exit_code],
            "exit_code": result.exit_code,
            "statement": statement(result),
            **asdict(result),
        },
        indent=1,
        ensure_ascii=False,
    )


def print_result(result: Result, console: Any) -> None:
    """The table of checks, then the divergences, then one line."""
    from rich.table import Table
    from rich.text import Text

    for line in _servers(result):
        console.print(line, highlight=False, markup=False)
    table = Table("check", "result", "found", show_lines=False, expand=False)
    for outcome in result.outcomes:
        state = Text(str(outcome.state), style=_STYLE[outcome.state])
        table.add_row(Text(outcome.name), state, Text(outcome.shown))
    console.print(table)
    rows = divergences(result.outcomes)
    if rows:
        console.print(_divergence_table(rows[:20]))
        if len(rows) > 20:
            console.print(f"... and {len(rows) - 20} more (--json has all)")
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    last = Text(statement(result), style="bold" if result.exit_code == 0 else "bold red")
    console.print(last)


def divergences(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every greedy divergence, unexplained first, each with the check it belongs to."""
    rows = [
        {"check": outcome.name, **row}
        for outcome in outcomes
        for row in outcome.details.get("divergences", ())
    ]
    return sorted(rows, key=lambda row: bool(row["explained"]))


def _divergence_table(rows: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "prompt", "token", "base", "spec", "gap", "margin", "")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    word = {True: "explained", False: "UNEXPLAINED", None: "not classified"}[row["explained"]]
    later = f", {row['later_outside']} more after it" if row["later_outside"] else ""
    note = f" ({row['note']})" if row["note"] else ""
    return [
        row["check"],
        row["prompt"],
        str(row["position"] + 1),
        _token(row["base_token"], row["base_text"]),
        _token(row["spec_token"], row["spec_text"]),
        _nats(row["gap"]),
        _nats(row["margin"]),
        word + later + note,
    ]


def _token(key: int | str | None, text: str) -> str:
    """The token as the server names it, and the answer's text around it."""
    named = "end" if key is None else repr(key)
    return f"{named} in {text!r}" if text else named


def write_report(result: Result, path: Path) -> None:
    """HTML or Markdown by the name's ending, plots inside."""
    body = _markdown(result)
    if path.suffix == ".html":
        body = _html(result)
    path.write_text(body, encoding="utf-8")


def _markdown(result: Result) -> str:
    lines = ["# Lossless check", "", f"**{statement(result)}**", ""]
    lines += [f"- {line}" for line in _servers(result)]
    lines += [f"- {result.seconds:.0f} s", *(f"- note: {note}" for note in result.notes)]
    lines += [*(f"- {line}" for line in missing()), ""]
    lines += ["| check | result | found |", "|---|---|---|"]
    lines += [f"| {o.name} | {o.state} | {_bar(o.shown)} |" for o in result.outcomes]
    rows = divergences(result.outcomes)
    if rows:
        lines += ["", "| check | prompt | token | base | spec | gap | margin | |", "|---" * 8 + "|"]
        lines += ["| " + " | ".join(_bar(cell) for cell in _cells(row)) + " |" for row in rows]
    for title, image in plots(result):
        lines += ["", f"![{title}](data:image/png;base64,{image})"]
    return "\n".join([*lines, ""])


def _html(result: Result) -> str:
    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        return f"<table><tr>{top}</tr>{body}</table>"

    checks = table(
        ("check", "result", "found"), [(o.name, str(o.state), o.shown) for o in result.outcomes]
    )
    rows = [_cells(row) for row in divergences(result.outcomes)]
    head = ("check", "prompt", "token", "base", "spec", "gap", "margin", "")
    differing = table(head, rows) if rows else ""
    images = "".join(
        f'<img alt="{html.escape(title)}" src="data:image/png;base64,{image}">'
        for title, image in plots(result)
    )
    shown = (*_servers(result), *result.notes, *missing())
    facts = "".join(f"<li>{html.escape(line)}</li>" for line in shown)
    style = (
        "body{font:15px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
        "td,th{border:1px solid #bbb;padding:.3em .6em;text-align:left}"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>Lossless check</title><style>{style}</style>'
        f"<h1>Lossless check</h1><p><b>{html.escape(statement(result))}</b></p><ul>{facts}</ul>"
        f"{checks}{differing}{images}\n"
    )


def _servers(result: Result) -> list[str]:
    return [f"base: {_server(result.base)}", f"spec: {_server(result.spec)}"]


def _server(facts: Facts) -> str:
    named = f"{facts.algorithm} " if facts.algorithm else ""
    return f"{facts.url} ({facts.engine} {facts.version}, {named}{facts.model}, {facts.dtype})"


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _bar(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
