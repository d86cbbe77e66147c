"""The tables of docs/layouts.md, made from `core.support`.

`python -m sglang_ext.core.support_table docs/layouts.md` writes them into the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_ext.core.support import ALGORITHMS, LAYOUTS, REFUSALS, WORKLOADS, Layout, verdict

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(where: Layout, algorithm: str) -> str:
    """One word for all workloads when they agree, else the workloads that run."""
    verdicts = {name: verdict(where, algorithm, name) for name in WORKLOADS}
    if all(v.yes for v in verdicts.values()):
        return "yes"
    reasons = sorted({v.reason for v in verdicts.values() if not v.yes})
    running = [name for name, v in verdicts.items() if v.yes]
    refused = f"refused: {'; '.join(reasons)}"
    return f"{', '.join(running)}; else {refused}" if running else refused


def tables() -> str:
    """Markdown: layouts by algorithm, workloads, refusals."""
    head = [_row(["layout", "ranks", "flags", *ALGORITHMS]), _row(["---"] * (3 + len(ALGORITHMS)))]
    layouts = [
        _row([x.name, str(x.ranks), f"`{' '.join(x.flags)}`", *(_cell(x, a) for a in ALGORITHMS)])
        for x in LAYOUTS
    ]
    workloads = [f"- {name}: {text}" for name, text in WORKLOADS.items()]
    refusals = [_row(["refused", "why", "remedy"]), _row(["---"] * 3)] + [
        _row([f"`{r.flag}` {r.beside}", r.why, r.remedy]) for r in REFUSALS.values()
    ]
    return "\n".join([*head, *layouts, "", *workloads, "", *refusals])


def with_tables(text: str) -> str:
    """The document with its tables made anew.

    Raises:
        ValueError: a document without the two marks.
    """
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"document: expected {BEGIN} and {END}, found one or none of them")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_tables(document.read_text()))
