"""A draft that is told the answer: right for exactly n rows, then wrong.

A speculative server under test drafts from a script instead of its model, so every accepted count
occurs at every position, whatever the model would have said.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

SCRIPT = "SGLANG_EXT_TEST_SCRIPT"
SCRIPTED = "scripted draft"


def install() -> None:
    """Replace the drafts of our workers by those of the script file that the variable names."""
    from sglang_ext.core.spec.types import Proposal
    from sglang_ext.srt.spec.dflash import DFlashWorker
    from sglang_ext.srt.spec.dspark import DSparkWorker

    texts: list[list[int]] = json.loads(Path(os.environ[SCRIPT]).read_text())

    def propose(worker: Any, live: Any, laws: Any) -> Proposal:
        worker.draft.hidden(live)  # the draft model runs as ever; only its word is not taken
        rows = [
            _row(texts, req, int(anchor), int(position), worker.gamma)
            for req, anchor, position in zip(live.reqs, live.anchors, live.prefix, strict=True)
        ]
        return Proposal(torch.tensor(rows, dtype=torch.int64))

    DSparkWorker.propose = propose  # type: ignore[method-assign]
    DFlashWorker.propose = propose  # type: ignore[method-assign]


def _row(texts: list[list[int]], req: Any, anchor: int, position: int, gamma: int) -> list[int]:
    if req is None:  # the speeds are being measured
        return [0] * gamma
    known = [*req.origin_input_ids, *req.output_ids]
    text = next((t for t in texts if t[: len(known)] == known[: len(t)]), [])
    ahead = (text[position + 1 :] + [0] * gamma)[:gamma]
    right = int(req.rid.split("-")[0])  # a request says itself how many rows are to be right
    return [token if k < right else (token + 1) % 256 for k, token in enumerate(ahead)]
