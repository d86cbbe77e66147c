"""The tables of docs/layouts.md, made from `core.support`.

`python -m sglang_ext.core.support_table docs/layouts.md` writes them into the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_ext.core.refusals import REFUSALS
from sglang_ext.core.support import (
    ALGORITHMS,
    LAYOUTS,
    MODELS,
    NEXTN,
    NONE,
    UNTRIED,
    V4,
    WORKLOADS,
    Layout,
    verdict,
)

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


# head -> the model and the algorithms of a column
COLUMNS = {model: (model, ALGORITHMS) for model in MODELS} | {f"{V4}, {NEXTN}": (V4, (NEXTN,))}


def _facts(where: Layout) -> list[str]:
    return [where.name, str(where.ranks), f"`{' '.join(where.flags)}`"]


def _cell(where: Layout, model: str, algorithms: tuple[str, ...]) -> str:
    """What runs: "yes" for all of `algorithms` and all workloads."""
    verdicts = {(a, w): verdict(where, model, a, w) for a in algorithms for w in WORKLOADS}
    reasons = sorted({v.reason for v in verdicts.values() if not v.yes})
    if not reasons:
        return "yes"
    if reasons == [UNTRIED]:
        return "-"
    refused = f"refused: {'; '.join(reasons)}"
    running = sorted({a for (a, _), v in verdicts.items() if v.yes})
    if not running:
        return refused
    alone = "without speculation" if running == [NONE] else ", ".join(running)
    return f"{alone}; else {refused}"


def tables() -> str:
    """Markdown: layouts by model and NEXTN, models, workloads, refusals."""
    head = [_row(["layout", "ranks", "flags", *COLUMNS]), _row(["---"] * (3 + len(COLUMNS)))]
    layouts = [_row(_facts(x) + [_cell(x, *c) for c in COLUMNS.values()]) for x in LAYOUTS]
    models = [f"- {name}: {text}" for name, text in MODELS.items()]
    workloads = [f"- {name}: {text}" for name, text in WORKLOADS.items()]
    refusals = [_row(["refused", "why", "remedy"]), _row(["---"] * 3)] + [
        _row([f"`{r.flag}` {r.beside}", r.why, r.remedy]) for r in REFUSALS.values()
    ]
    return "\n".join([*head, *layouts, "", *models, "", *workloads, "", *refusals])


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
