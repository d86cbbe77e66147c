"""Measures how long a verification and a draft take here, once per machine and pair of models."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_ext import __version__, env
from sglang_ext.core.spec.errors import TableError
from sglang_ext.core.spec.speed_grid import SpeedGrid
from sglang_ext.srt.spec.live import LiveBatch
from sglang_ext.srt.spec.ranks import dp_slots, set_rows
from sglang_ext.srt.spec.verify_input import block_batch, make_verify_input

logger = logging.getLogger(__name__)

_BATCHES = (1, 2, 4, 8, 16, 32)
_CONTEXT = 128
_REPEATS = 5


def grid_for(worker: Any) -> SpeedGrid:
    """The speed grid of a worker: from the cache, else measured and cached.

    Rank 0 decides for all ranks, which must measure together or not at all.
    """
    group, path = worker.tp_group, _cache_path(worker)
    found = _cached(path) if group.rank_in_group == 0 else None
    if group.world_size > 1:
        found = group.broadcast_object(found, src=0)
    if found is not None:
        return found
    started = time.perf_counter()
    grid = measure(worker)
    if group.world_size > 1:
        grid = group.broadcast_object(grid, src=0)
    if group.rank_in_group == 0:
        _keep(grid, path)
        logger.info("Measured speeds in %.1f s: %s", time.perf_counter() - started, path)
    return grid


def _keep(grid: SpeedGrid, path: Path) -> None:
    """Write the cache file whole or not at all; a server without one measures again."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        grid.save(unfinished)
        unfinished.replace(path)
    except OSError as error:
        logger.warning("Measured speeds are not kept: %s", error)


def _cached(path: Path) -> SpeedGrid | None:
    if not path.is_file():
        return None
    try:
        return SpeedGrid.load(path)
    except TableError as error:
        logger.warning("%s: %s Measuring again.", path, error)
        return None


def measure(worker: Any) -> SpeedGrid:
    """Time the target over a grid of (requests, rows) and the draft over requests."""
    runner = worker.model_runner
    capacity = runner.req_to_token_pool.req_to_token.shape[0] - 1
    slots = runner.max_total_num_tokens
    length = min(_CONTEXT, runner.model_config.context_len - worker.gamma - 2, slots // 2)
    batches = [b for b in _BATCHES if b <= capacity]
    rows = sorted({1, 2, 4, worker.gamma + 1} & set(range(1, worker.gamma + 2)))
    with _Scratch(runner, batches[-1], length + worker.gamma + 1) as scratch:
        verify = tuple(
            tuple(_typical(partial(scratch.verify, b, n, length)) for n in rows) for b in batches
        )
        draft = tuple(
            _typical(partial(worker.time_draft, scratch.live(b, length))) for b in batches
        )
    return SpeedGrid(tuple(batches), tuple(rows), verify, draft)


class _Scratch:
    """Borrows request rows and token slots of a server that has no requests yet."""

    def __init__(self, runner: Any, requests: int, tokens: int) -> None:
        self.runner = runner
        self.table = runner.req_to_token_pool.req_to_token
        self.rows = torch.arange(1, requests + 1, device=self.table.device)
        self.tokens = tokens

    def __enter__(self) -> _Scratch:
        # All requests share one run of slots: what is read does not matter, only how much.
        self.table[self.rows, : self.tokens] = torch.arange(
            1, self.tokens + 1, dtype=self.table.dtype, device=self.table.device
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.table[self.rows, : self.tokens] = 0

    def live(self, requests: int, length: int) -> LiveBatch:
        """`requests` pretended requests of `length` tokens each."""
        rows = self.rows[:requests]
        return LiveBatch.pretended(rows, torch.full_like(rows, length))

    def verify(self, requests: int, rows: int, length: int) -> None:
        """One target pass over `rows` rows of each request."""
        live = self.live(requests, length)
        positions = live.prefix[:, None] + torch.arange(rows, device=live.prefix.device)
        ids = torch.zeros_like(positions)
        info = make_verify_input(ids.flatten(), positions.flatten(), [rows] * requests)
        batch = block_batch(self.runner, live, ids, positions, info)
        set_rows(batch, positions.numel(), dp_slots())
        with torch.inference_mode():
            self.runner.forward(batch)


def _typical(run: Callable[[], object]) -> float:
    """Second fastest of a few runs: what else the machine does only ever adds time."""
    run()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times)[1]


def _layout() -> list[Any]:
    """Everything about the ranks that a forward's time depends on."""
    p = get_parallel()
    sizes = (p.tp_size, p.attn_dp_size, p.attn_cp_size, p.attn_tp_size, p.moe_ep_size)
    moe, overlap = get_exec().moe, get_exec().overlap
    exchange = [moe.moe_a2a_backend, str(moe.deepep_mode), overlap.enable_single_batch_overlap]
    return [*sizes, *exchange, p.enable_dp_lm_head]


def _cache_path(worker: Any) -> Path:
    """A file named by everything that the times depend on."""
    runner = worker.model_runner
    facts = {
        "version": __version__,
        "machine": [platform.machine(), platform.processor(), platform.node()],
        "threads": torch.get_num_threads(),
        "device": str(runner.device),
        "dtype": str(runner.dtype),
        "target": runner.model_config.hf_text_config.to_json_string(),
        "draft": repr(worker.draft.config),
        "gamma": worker.gamma,
        "draft_dtype": str(worker.draft.runner.dtype),
        "kv": [str(runner.kv_cache_dtype), runner.page_size],
        "backend": type(runner.attn_backend).__name__,
        "fast": env.FAST_FORWARD.get(),
        "index_share": env.INDEX_SHARE.get(),
        "layout": _layout(),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return env.CACHE_DIR.get() / "speed" / f"{worker.algorithm.lower()}-{digest}.json"
