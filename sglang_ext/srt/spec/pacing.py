"""Whether a round drafts, and how much of each draft it verifies.

Two decisions, both made from what cannot depend on the tokens they are about: the gate looks at
past rounds and measured times, the scheduler at confidences, each computed from the token before
the one it rates.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext import env
from sglang_ext.core.spec.calibration import StsTemperatures
from sglang_ext.core.spec.confidence import survivals
from sglang_ext.core.spec.gate import DraftGate, RoundTimes
from sglang_ext.core.spec.round_clock import RoundClock
from sglang_ext.core.spec.schedule import LaggedScheduler, schedule_prefixes
from sglang_ext.core.spec.speed_grid import SpeedGrid
from sglang_ext.core.spec.sps import SpeedTable
from sglang_ext.core.spec.types import Proposal


class Pacer:
    """Decides for one worker.

    grid:  measured speeds; None drafts and verifies everything
    table: the verify speeds that the scheduler reads, the user's or the grid itself
    sts:   temperatures of the confidence head; None leaves confidences as they are
    """

    def __init__(
        self, gamma: int, grid: SpeedGrid | None, table: SpeedTable | None, sts: Any
    ) -> None:
        self.gamma = gamma
        self.grid = grid
        self.table = grid if table is None else table
        self.temperatures = None if sts is None else sts.tensor(gamma)
        self.mode = env.SCHEDULER.get()
        self.lagged = LaggedScheduler(self.table) if self.mode == "async" else None
        gated = grid is not None and env.PAYS.get()
        self.gate = DraftGate(probe_every=env.PROBE_EVERY.get()) if gated else None
        self.clock = RoundClock()

    @property
    def uses_confidence(self) -> bool:
        return self.mode != "off" and self.table is not None

    def drafts(self, keys: list[str]) -> bool:
        """Whether the coming round drafts for the requests named by `keys`."""
        if self.gate is None or self.grid is None or not keys:
            return True
        count = len(keys)
        if self.clock.wants_plain(count):
            return False
        rows = self.gate.expected_rows(count)
        plain, drafted = self.clock.factors(count)
        times = RoundTimes(
            decode=plain * self.grid.decode(count),
            draft=drafted * self.grid.draft(count),
            verify=drafted * float(self.grid.seconds(count, rows)[-1]),
        )
        return self.gate.drafts(keys, times)

    def timed(self, requests: int, rows: int, *, drafted: bool, seconds: float) -> None:
        """Note how long a round of `requests` requests with `rows` rows in all took."""
        if self.gate is None or self.grid is None:
            return
        predicted = float(self.grid.seconds(requests, rows)[-1])
        if drafted:
            predicted += self.grid.draft(requests)
        self.clock.note(requests, drafted=drafted, seconds=seconds, predicted=predicted)

    def lengths(self, keys: list[str], proposal: Proposal, caps: list[int]) -> list[int]:
        """[R] drafts to verify of each request."""
        if not self.uses_confidence or proposal.confidence is None or self.table is None:
            return list(caps)
        chances = survivals(proposal.confidence, self.temperatures).double().cpu().numpy()
        draft = 0.0 if self.grid is None else self.grid.draft(len(keys))
        if self.lagged is not None:
            return self.lagged.plan(keys, chances, draft_seconds=draft, caps=caps)
        return schedule_prefixes(chances, self.table, draft_seconds=draft, caps=caps)

    def record(self, keys: list[str], committed: list[int], rows: list[int]) -> None:
        """Note what a drafted round earned."""
        if self.gate is not None:
            self.gate.record(keys, committed, rows)

    def forget(self, key: str) -> None:
        if self.gate is not None:
            self.gate.forget((key,))


def load_sts(path: str | None, folder: Any, gamma: int) -> StsTemperatures | None:
    """The file the user names, else `sts.json` beside the draft's weights, else None."""
    beside = folder / "sts.json"
    if path is None and not beside.is_file():
        return None
    found = StsTemperatures.load(path or beside)
    found.tensor(gamma)
    return found


def same_on_all_ranks(numbers: list[int], group: Any) -> list[int]:
    """Rank 0's numbers: a clock or the rounding of a confidence must not part the ranks."""
    if group.world_size == 1:
        return numbers
    values = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.broadcast(values, src=group.ranks[0], group=group.cpu_group)
    return [int(n) for n in values.tolist()]
