"""Records what `sglang-ext calibrate sts` fits on: confidence logits and what became of the drafts.

Off unless SGLang's own SGLANG_DSPARK_STS_COLLECT_PATH names a place. Only requests whose whole
block was verified are written: the others do not say what the rest of their drafts was worth.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from sglang.srt.environ import envs
from torch import Tensor

from sglang_ext import env


class ConfidenceLog:
    """Appends one JSON line per request and round to `STEM.PID.jsonl`.

    A line: {"logits": [gamma raw confidence logits], "accepted": drafts accepted}.
    """

    def __init__(self, stem: str, gamma: int) -> None:
        self.gamma = gamma
        self.path = Path(f"{stem}.{os.getpid()}.jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, logits: Tensor, verified: list[int], accepted: list[int]) -> None:
        """logits [R, gamma]; verified, accepted: [R] drafts of each request."""
        rows = zip(logits.float().tolist(), verified, accepted, strict=True)
        for row, length, kept in rows:
            if length == self.gamma:
                self._file.write(json.dumps({"logits": row, "accepted": kept}) + "\n")


def confidence_log(gamma: int, *, has_head: bool, writes: bool) -> ConfidenceLog | None:
    """The log that the environment asks for, or None.

    writes: whether this rank is the one of its group that writes.
    Raises ValueError where what was recorded could not be fitted on.
    """
    stem = envs.SGLANG_DSPARK_STS_COLLECT_PATH.get()
    if not stem:
        return None
    if not has_head:
        raise ValueError(
            "SGLANG_DSPARK_STS_COLLECT_PATH: expected a draft with a confidence head, found one "
            "without. Unset the variable; this draft needs no temperatures."
        )
    if env.SCHEDULER.get() != "off":
        raise ValueError(
            "SGLANG_EXT_SCHEDULER: expected off while SGLANG_DSPARK_STS_COLLECT_PATH is set, found "
            f"{env.SCHEDULER.get()}. Every draft must be verified to say whether it was right."
        )
    return ConfidenceLog(stem, gamma) if writes else None
