"""Ranks forked from the warm test process, joined by gloo through a file: no ports, no imports."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LIMIT = timedelta(seconds=60)


def run_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """work(group, *args) on `world` ranks -> what each returned, in rank order.

    Raises:
        AssertionError: the traceback of every rank that failed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            store = Path(folder) / "store"
            process = context.Process(target=_rank, args=(there, store, rank, world, work, args))
            process.start()
            there.close()
            pipes.append(here)
            ranks.append(process)
        answers = [_answer(pipe) for pipe in pipes]
        for process in ranks:
            process.join(_LIMIT.seconds)
    failed = [f"rank {i}:\n{text}" for i, (good, text) in enumerate(answers) if not good]
    # A rank that fails closes its connections: the others' complaints hide the cause.
    causes = [text for text in failed if "Connection closed by peer" not in text]
    assert not failed, "\n".join(causes or failed)
    return [value for _, value in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(_LIMIT.seconds):
        return False, "no answer in time"
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
        return answer
    except EOFError:
        return False, "died without an answer"


def _rank(
    pipe: Connection, store: Path, rank: int, world: int, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        shared = dist.FileStore(str(store), world)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=_LIMIT)
        value = work(dist.group.WORLD, *args)
        dist.barrier()
        # Whole: a connection's own pickling leaves tensors with a process that is about to end.
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        dist.destroy_process_group()
