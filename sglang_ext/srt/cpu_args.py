"""What a plain CPU needs decided before a server starts: backend, threads per rank, memory.

Each decision applies only where the user gave no value of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang.srt.arg_groups.overrides import (
    declare_resolution,
    model_config_of,
    resolving_view,
)

from sglang_ext import env

SOURCE = "sglang_ext.cpu_defaults"
THREAD_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
# Holds the binding that was computed here, so that a later server of the same process, or a child
# that inherits the environment, tells it from one that the user set.
COMPUTED_BINDING = "SGLANG_EXT_COMPUTED_THREADS_BIND"
# The machine is shared with the tokenizer, the detokenizer and whatever else its owner runs, and a
# CPU server that swaps is worse than one that queues: KV gets under half of what weights leave.
KV_SHARE = 0.4
# Linear weights are kept packed beside the originals.
COPIES = 2
CONTEXTS_KEPT = 16
LEAST_TOKENS = 65_536
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
# About 0.1 ms: longer than the serial code between two parallel regions of a forward.
SPINS = 1000


def all_ranks(cfg: Any) -> int:
    """Model ranks on all nodes."""
    dp = 1 if cfg.enable_dp_attention else max(cfg.dp_size or 1, 1)
    return (cfg.tp_size or 1) * (cfg.pp_size or 1) * dp


def ranks_on_node(cfg: Any) -> int:
    """Model ranks this node will start."""
    return max(all_ranks(cfg) // max(cfg.nnodes or 1, 1), 1)


def thread_sets(ranks: int, cpus: list[int]) -> str:
    """Disjoint core lists, one per rank, in SGLang's `a,b|c,d` spelling.

    With fewer cores than ranks the cores are reused in turn.
    """
    if len(cpus) < ranks:
        return "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
    share = len(cpus) // ranks
    return "|".join(
        ",".join(str(cpu) for cpu in cpus[rank * share : (rank + 1) * share])
        for rank in range(ranks)
    )


def bind_threads(ranks: int, everywhere: int) -> None:
    """Give this node's ranks their cores; SGLang asks for that as soon as there are two ranks
    anywhere and fewer NUMA nodes here."""
    given = os.environ.get(THREAD_BINDING)
    if given and given != os.environ.get(COMPUTED_BINDING):
        return
    if everywhere == 1:
        for name in (THREAD_BINDING, COMPUTED_BINDING):
            os.environ.pop(name, None)
        return
    sets = thread_sets(ranks, sorted(os.sched_getaffinity(0)))
    os.environ[THREAD_BINDING] = os.environ[COMPUTED_BINDING] = sets


def _limit_spinning() -> None:
    """Let a thread that waits for its team sleep soon, where the user set no policy.

    OpenMP's default spins for tens of milliseconds. As soon as anything else wants a core (the
    tokenizer does), the spinner keeps it from the very thread it waits for: measured on two shared
    cores, a decode step took four times as long. Read when a rank loads OpenMP.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def _expect_no_cuda_dump() -> None:
    """SGLang ends a failed server after a minute's wait for dumps of GPUs, while a rank lives."""
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "false")


def weight_bytes(path: str | None) -> int:
    """Bytes of the weight files in a local checkpoint folder; 0 where they cannot be counted."""
    folder = Path(path or "")
    if path is None or not folder.is_dir():
        return 0
    names = ("*.safetensors", "*.bin", "*.gguf")
    return sum(file.stat().st_size for name in names for file in folder.glob(name))


def memory_allowed() -> int:
    """Bytes this process may still take: what the machine has free, or its container's rest."""
    free = psutil.virtual_memory().available
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = Path(limit_file).read_text(), Path(used_file).read_text()
        except OSError:
            continue
        if limit.strip().isdigit():
            return max(min(free, int(limit) - int(used)), 1)
    return free


def memory_fraction(ranks: int, weights: int, free: int) -> float:
    """SGLang's `mem_fraction_static` for one of `ranks` ranks.

    SGLang gives a rank `fraction * free - (all weights just loaded)` bytes of KV, measured on the
    whole machine, so the ranks' common weights are added back and only KV is shared out.
    """
    loaded = min(weights / free, 0.95)
    return round(loaded + KV_SHARE * (1 - loaded) / ranks, 4)


def token_capacity(context_length: int) -> int:
    """Most tokens worth keeping KV for; memory may allow fewer.

    The pool is touched when it is made, so what a CPU server will not use is memory lost.
    """
    return max(CONTEXTS_KEPT * context_length, LEAST_TOKENS)


def _is_fp32(hf_config: Any) -> bool:
    """Whether a checkpoint says float32, or nothing, of its weights."""
    return getattr(hf_config, "dtype", None) in (None, torch.float32, "float32")


def resolve_cpu_defaults(server_args: Any) -> None:
    """Declare what is unset: attention backend, dtype, memory, threads, idle sleep."""
    cfg = resolving_view(server_args)
    if cfg.device != "cpu":
        return
    # An idle server that polls takes a core from whoever shares the machine.
    decided: dict[str, Any] = {"sleep_on_idle": True}
    if not env.OVERLAP.get():
        # There is no device to overlap with, and SGLang's penalties lag a token behind under it.
        decided["disable_overlap_schedule"] = True
    if cfg.attention_backend is None:
        decided["attention_backend"] = "portable"
    if cfg.mem_fraction_static is None:
        weights = weight_bytes(cfg.model_path) + weight_bytes(cfg.speculative_draft_model_path)
        if env.FAST_FORWARD.get():
            weights *= COPIES
        free, allowed = psutil.virtual_memory().available, memory_allowed()
        share = memory_fraction(ranks_on_node(cfg), weights, allowed) * allowed / free
        decided["mem_fraction_static"] = round(share, 4)
    model = model_config_of(server_args)
    if cfg.dtype == "auto" and _is_fp32(model.hf_config):
        # SGLang would make it float16, which a CPU computes slower and less exactly.
        decided["dtype"] = "float32"
    if cfg.max_total_tokens is None:
        decided["max_total_tokens"] = token_capacity(model.context_len)
    declare_resolution(server_args, SOURCE, **decided)
    bind_threads(ranks_on_node(cfg), all_ranks(cfg))
    _limit_spinning()
    _expect_no_cuda_dump()
