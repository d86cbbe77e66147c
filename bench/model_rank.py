"""One served model rank in this process: loader, pools and backend are real, no scheduler."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def model_rank(path: Path, dtype: str, **more: Any) -> Iterator[Any]:
    """SGLang's model runner of the checkpoint, as a server's rank has it; leaves no process group.

    more: further arguments of the server.
    """
    import sglang.benchmark.one_batch as one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    args = ServerArgs(
        model_path=str(path),
        dtype=dtype,
        disable_radix_cache=True,
        nccl_port=_free_port(),
        log_level="error",
        **{"max_total_tokens": 1024, "max_running_requests": 8, **more},
    )
    args.resolve_once()
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0
    )
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    try:
        yield runner.torch_runner
    finally:
        set_global_expert_location_metadata(None, allow_overwrite=True)
        one_batch.destroy_model_parallel()
        one_batch.destroy_distributed_environment()


def forward_batch(mode: ForwardMode, rows: Tensor, seq_lens: Tensor, **fields: Any) -> ForwardBatch:
    """The batch that a scheduler makes of requests at `rows` of the request pool."""
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        return_logprob=False,
        global_num_token_non_padded_cpu=len(fields["input_ids"]),
        **fields,
    )
