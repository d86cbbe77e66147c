"""Other engines over the same weights, each a process that takes its turn beside our servers."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.serving import Server
from sglang_ext.srt.cpu_args import SPINS


def spinning_little() -> dict[str, str]:
    """What our servers set for themselves, so that nothing we compare with waits in another way."""
    return {"GOMP_SPINCOUNT": str(SPINS), **os.environ}


class Peer:
    """A process that answers {"prompts", "tokens"} with {"seconds", "tokens"}, a line each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args}: expected an answer, found that it ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def peer(command: Sequence[str]) -> Iterator[Peer]:
    """Run `command` as a `Peer` until the block ends."""
    with subprocess.Popen(
        list(command),
        env=spinning_little(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def against(
    other: Peer,
    servers: dict[str, Server],
    prompts: list[list[int]],
    *,
    batch: int,
    tokens: int,
    repeats: int,
) -> dict[str, float]:
    """server -> median over turns of its tokens/s against the peer's, the same tokens each."""
    load = list(itertools.islice(itertools.cycle(prompts), batch))
    found: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(repeats + 1):  # the first turn warms up
        theirs = other.run(load, tokens)
        for name, server in servers.items():
            ours = server.run(load, tokens, batch, ignore_eos=True)
            speed = ours.tokens / ours.seconds
            if turn:
                found[name].append(speed * theirs["seconds"] / theirs["tokens"])
    return {name: statistics.median(ratios) for name, ratios in found.items()}
