"""CUDA graphs are off for models whose attention plans each forward on the host."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

logger = logging.getLogger(__name__)


def switch_off(server_args: Any, title: str, source: str) -> None:
    """Turn off, on CUDA, the graphs that SGLang would capture by default.

    Raises:
        ValueError: graphs that the user asked for.
    """
    cfg = resolving_view(server_args)
    config = cfg.cuda_graph_config
    if not str(cfg.device).startswith("cuda") or config is None:
        return
    asked = getattr(server_args, "_cuda_graph_config_locked", ())
    wanted = [phase for phase in Phase.ALL if getattr(config, phase).backend != Backend.DISABLED]
    for phase in wanted:
        if (phase, "backend") in asked:
            raise ValueError(
                f"--cuda-graph-backend-{phase}: expected disabled with {title} on this package, "
                f"found {getattr(config, phase).backend!r}. Its attention plans each forward on "
                "the host, which a graph cannot hold. Leave it out."
            )
        config = with_phase(config, phase, backend=Backend.DISABLED)
    if wanted:
        declare_resolution(server_args, source, cuda_graph_config=config)
        logger.warning(
            "CUDA graphs are off (%s): attention of %s on this package plans each forward on the "
            "host. Expect decoding to be slower than with graphs.",
            " and ".join(wanted),
            title,
        )
