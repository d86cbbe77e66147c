"""Per-request seeds at prefill: SGLang's sampler reads them only in its deterministic mode."""

from __future__ import annotations

from typing import Any

import torch


def seed_prefill(batch: Any, generator: torch.Generator) -> None:
    """Give the prefill's sampler the seeds its requests carry, and the others a fresh one each."""
    info = batch.sampling_info
    if info is None or info.sampling_seed is not None:
        return
    asked = [req.sampling_params.sampling_seed for req in batch.reqs]
    if all(seed is None for seed in asked):
        return
    fresh = torch.randint(1 << 31, (len(asked),), generator=generator).tolist()
    info.sampling_seed = torch.tensor(
        [new if seed is None else seed for seed, new in zip(asked, fresh, strict=True)],
        dtype=torch.int64,
        device=info.temperatures.device,
    )
