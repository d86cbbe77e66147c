"""Step times measured over (requests, rows per request), read by the scheduler and the gate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sglang_ext.core.spec.errors import TableError, TableReader, write_table
from sglang_ext.core.spec.sps import Array

_NAME = "speed grid"
_REMEDY = "Delete the file; the server measures it again at start-up."


@dataclass(frozen=True)
class SpeedGrid:
    """Seconds of a verification and of a draft on one machine, for one pair of models.

    requests: [m] strictly increasing batch sizes
    rows:     [n] strictly increasing verify rows per request, the first is 1
    verify_seconds: [m][n]; draft_seconds: [m], a block for every request
    """

    requests: tuple[int, ...]
    rows: tuple[int, ...]
    verify_seconds: tuple[tuple[float, ...], ...]
    draft_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.requests or any(np.diff(self.requests) <= 0):
            raise _error("requests", "strictly increasing batch sizes", self.requests)
        if not self.rows or self.rows[0] != 1 or any(np.diff(self.rows) <= 0):
            raise _error("rows", "strictly increasing row counts from 1", self.rows)
        shape = (len(self.requests), len(self.rows))
        found = np.shape(self.verify_seconds)
        if found != shape or not (np.asarray(self.verify_seconds) > 0).all():
            raise _error("verify_seconds", f"{shape} times above 0", found)
        if len(self.draft_seconds) != len(self.requests) or min(self.draft_seconds) <= 0:
            raise _error("draft_seconds", f"{shape[0]} times above 0", self.draft_seconds)

    def seconds(self, requests: int, most: int) -> Array:
        """[most - requests + 1] verify time at B = requests .. most rows in all."""
        curve = self._curve(requests)
        rows = np.arange(requests, most + 1) / requests
        return np.interp(rows, self.rows, curve)

    def _curve(self, requests: int) -> Array:
        """[n] verify time of `requests` requests at each row count, non-decreasing in rows."""
        table = np.maximum.accumulate(np.asarray(self.verify_seconds), axis=1)
        columns = [np.interp(requests, self.requests, column) for column in table.T]
        beyond = max(requests / self.requests[-1], 1.0)
        return np.asarray(columns) * beyond

    def decode(self, requests: int) -> float:
        """Seconds of a plain step."""
        return float(self._curve(requests)[0])

    def draft(self, requests: int) -> float:
        """Seconds of a draft for `requests` requests."""
        beyond = max(requests / self.requests[-1], 1.0)
        return float(np.interp(requests, self.requests, self.draft_seconds)) * beyond

    def save(self, path: str | Path) -> None:
        write_table(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> SpeedGrid:
        """Raises TableError for a file that is not a speed grid."""
        read = TableReader(_NAME, path, _REMEDY)
        read.refuse_unknown(set(cls.__dataclass_fields__))
        requests = tuple(read.wholes("requests"))
        rows = tuple(read.wholes("rows"))
        verify = read.rectangle("verify_seconds", len(requests), len(rows))
        return cls(requests, rows, verify, tuple(read.numbers("draft_seconds")))


def _error(field: str, expected: str, found: object) -> TableError:
    return TableError(_NAME, field, expected=expected, found=found, remedy=_REMEDY)
