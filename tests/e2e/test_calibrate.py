"""What a running server records is what `calibrate sts` fits on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.calibrate.sts import fit, read
from tests.e2e.client import greedy
from tests.e2e.servers import StartFailure
from tests.e2e.stand import Stand
from tests.e2e.workload import ragged

pytestmark = pytest.mark.e2e

COLLECT = "SGLANG_DSPARK_STS_COLLECT_PATH"
GAMMA = 4


def test_records_every_whole_round(stand: Stand, tmp_path: Path) -> None:
    env = {COLLECT: str(tmp_path / "log" / "run")}
    client = stand.speculative("DSPARK", "vanilla", gamma=GAMMA, env=env)
    sampled = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    replies = client.batch(ragged(16, 7), greedy(40, ignore_eos=True))
    replies += client.batch(ragged(16, 8), sampled)
    plain = client.batch(ragged(4, 7)[:4], greedy(40, ignore_eos=True))
    assert [r.ids for r in plain] == [r.ids for r in replies[:4]]
    files = list((tmp_path / "log").iterdir())
    assert len(files) == 1
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    rounds = [r for reply in (*replies, *plain) for r in [reply.accepted]]
    counted = sum(map(sum, rounds))
    # The last rounds of a request draft less than a block; all others are recorded.
    assert counted - 3 * len(rounds) <= len(rows) <= counted
    assert all(len(row["logits"]) == GAMMA for row in rows)
    whole = sum(histogram[GAMMA] for histogram in rounds if len(histogram) > GAMMA)
    assert sum(row["accepted"] == GAMMA for row in rows) == whole
    fitted = fit(read(files), "tiny")
    assert len(fitted.temperatures) == GAMMA
    assert all(a <= b for a, b in zip(fitted.ece_after, fitted.ece_before, strict=True))


def test_refuses_to_record_a_part_of_the_drafts(stand: Stand, tmp_path: Path) -> None:
    env = {COLLECT: str(tmp_path / "run"), "SGLANG_EXT_SCHEDULER": "sync"}
    with pytest.raises(StartFailure) as failure:
        stand.speculative("DSPARK", "vanilla", gamma=GAMMA, env=env)
    assert "SGLANG_EXT_SCHEDULER: expected off" in failure.value.log
