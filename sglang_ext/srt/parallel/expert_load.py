"""How evenly a rebalance spreads the experts' load over ranks, before and after, as a metric.

The load is what was counted since the last rebalance; an expert's copies share it evenly.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch.distributed as dist
from prometheus_client import Gauge
from sglang.srt.runtime_context import get_observability
from torch import Tensor

from sglang_ext.core.eplb import Placement
from sglang_ext.core.eplb_transfer import plan_fetches
from sglang_ext.srt.parallel.seen import note

logger = logging.getLogger(__name__)


def report(counts: Tensor, before: Any, after: Any) -> None:
    """Log and export max / mean load over ranks, and log once that a rank took another's expert.

    The first rank speaks for all.

    Args:
        counts: [..., layer, expert], tokens an expert was chosen for; leading axes are summed.
        before: SGLang's ExpertLocationMetadata in force.
        after: the one that replaces it.
    """
    if dist.get_rank() != 0:
        return
    old, new = before.physical_to_logical_map.cpu(), after.physical_to_logical_map.cpu()
    if any(fetch.source_gpu != fetch.gpu for fetch in plan_fetches(old, new, after.ep_size)):
        note("experts moved between ranks")
    load = counts.reshape(-1, *counts.shape[-2:]).sum(dim=0).cpu()
    # Dense layers have a row too, without load.
    layers = load.sum(dim=1).nonzero().flatten().tolist()
    if not layers:
        return
    ratios = {
        when: _placement(metadata).imbalance(load, metadata.ep_size)[layers]
        for when, metadata in (("before", before), ("after", after))
    }
    logger.info(
        "expert load of %d layers, max / mean over ranks: %.3f before, %.3f after (worst layer "
        "%.3f and %.3f)",
        len(layers),
        *(float(ratio.mean()) for ratio in ratios.values()),
        *(float(ratio.max()) for ratio in ratios.values()),
    )
    if get_observability().enable_metrics:
        for when, ratio in ratios.items():
            for layer, value in zip(layers, ratio.tolist(), strict=True):
                _gauge().labels(layer, when).set(value)


def _placement(metadata: Any) -> Placement:
    return Placement(
        metadata.physical_to_logical_map.cpu(),
        metadata.logical_to_all_physical_map.cpu(),
        metadata.logical_to_all_physical_map_num_valid.cpu(),
    )


@cache
def _gauge() -> Gauge:
    return Gauge(
        "sglang_ext_expert_load_max_over_mean",
        "Load of the busiest rank over the mean, by the tokens counted before the last rebalance: "
        "with the placement that it found, and with the one that it made. Of replicas, the "
        "last one to rebalance.",
        ["layer", "when"],
        multiprocess_mode="mostrecent",
    )
