"""Wrong drafts leave no trace: every accepted count, at every place of a block, for gamma 1 to 8.

Requests walk over one text in verifications of 1 + gamma rows. Behind the rows that are kept stand
wrong tokens; the next verification goes on where they were, and its logits are HF's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.srt.attention import dsv4
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle import v4, v32
from tests.oracle.v32 import Sequences
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
GAMMAS = range(1, 9)
# Walks that run side by side.
TOGETHER = 48
START = 2
# Every position modulo 128, the length of the longest block, and what is behind its end.
PERIOD = 140


@dataclass(frozen=True)
class Walk:
    """Verifications of 1 + gamma rows from `first` on, `kept` of which are right and stay."""

    gamma: int
    kept: int
    first: int


def walks(period: int) -> list[Walk]:
    """For every gamma and kept count, one from each of `kept` places: all positions are met."""
    found = [
        Walk(gamma, kept, START + lag)
        for gamma in GAMMAS
        for kept in range(1, gamma + 2)
        for lag in range(kept)
    ]
    # Those of a batch take about the same number of steps.
    assert all(walk.first < START + period for walk in found)
    return sorted(found, key=lambda walk: walk.kept)


def differences(
    world: ModelWorld, hf: Any, load: Any, some: Sequence[Walk], period: int
) -> dict[Walk, float]:
    """Largest difference to HF's logits in the kept rows of each walk."""
    text = random.Random(1).choices(range(256), k=START + period + 2 * max(GAMMAS))
    expected, worst = load.hf_logits(hf, text), dict.fromkeys(some, 0.0)
    for at in range(0, len(some), TOGETHER):
        group = some[at : at + TOGETHER]
        play = Sequences(world, [text] * len(group))
        play.extend({r: walk.first for r, walk in enumerate(group)})
        ends = [walk.first + period for walk in group]
        while alive := [r for r, end in enumerate(ends) if play.done[r] < end]:
            before = list(play.done)
            for r in alive:
                right = before[r] + group[r].kept
                play.sequences[r] = [*text[:right], *((token + 1) % 256 for token in text[right:])]
            counts = {r: group[r].gamma + 1 for r in alive}
            kept = {r: group[r].kept for r in alive}
            for r, logits in play.verify(counts, commit=kept).items():
                wanted = expected[before[r] : before[r] + kept[r]]
                found = float((logits[: kept[r]] - wanted).abs().max())
                worst[group[r]] = max(worst[group[r]], found)
    return worst


def _world(path: Path, period: int) -> Any:
    tokens = TOGETHER * (START + period + 2 * max(GAMMAS))
    return model_world(path, "float32", max_total_tokens=tokens, max_running_requests=TOGETHER)


def test_deepseek_v4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Window, window, CSA and HCA; then with entries of rejected drafts left in their place."""
    path = deepseek_v4.write(tmp_path, seed=3, mixing=1.0, layers=4)
    hf = v4.load_hf(path)
    with _world(path, PERIOD) as world:
        found = differences(world, hf, v4, walks(PERIOD), PERIOD)
        assert {walk: d for walk, d in found.items() if d >= TOLERANCE} == {}
        for rows in world.runner.token_to_kv_pool.rows:
            for buffer in rows.values():
                buffer.zero_()  # so that what is found in a slot is this text's own
        monkeypatch.setattr(dsv4._LayerCall, "_compress", _only_where_empty)
        some = [walk for walk in walks(PERIOD) if (walk.gamma, walk.kept) == (5, 3)]
        assert min(differences(world, hf, v4, some, PERIOD).values()) > 10 * TOLERANCE


_compress = dsv4._LayerCall._compress


def _only_where_empty(self: Any, mapped: Any, new: Any, source: str, target: str) -> None:
    before = self.rows[target].clone()
    _compress(self, mapped, new, source, target)
    made = before.abs().sum(dim=-1) > 0
    self.rows[target][made] = before[made]


def test_deepseek_v32(tmp_path: Path) -> None:
    path = deepseek_v32.write(tmp_path, seed=3, mixing=1.0, index_topk=16, index_n_heads=16)
    save_tokenizer(path)
    period = max(GAMMAS) + 1
    with _world(path, period) as world:
        found = differences(world, v32.load_hf(path), v32, walks(period), period)
    assert {walk: d for walk, d in found.items() if d >= TOLERANCE} == {}
