"""How far a start has come, by the lines that SGLang prints on its way."""

from __future__ import annotations

import re

# Patterns in the log, in order.
STAGES = (
    (r"server_args=", "arguments resolved"),
    (r"Init parallel begin", "ranks meeting"),
    (r"Load weight begin", "loading weights"),
    (r"Load weight end", "weights loaded"),
    (r"KV Cache (?:is allocated|VA upper bound)", "KV cache allocated"),
    (r"Capture [a-z ]+ CUDA graph begin", "capturing graphs"),
    (r"The server is fired up", "ready"),
)


def stage_of(log: str) -> str:
    """The last stage that a log shows."""
    reached = [label for mark, label in STAGES if re.search(mark, log)]
    return reached[-1] if reached else "starting Python"
