"""Which parts of a layout were in use: each is logged the first time a rank meets it."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)
_seen: set[str] = set()


def note(event: str) -> None:
    """Log `event` once per process; operators and tests read it to know what a run covered."""
    if event not in _seen:
        _seen.add(event)
        logger.info("layout: first %s", event)


def note_gather(forward_batch: Any) -> None:
    """How the rows of several DP ranks meet: padded to the longest rank, or one after another."""
    mode, counts = forward_batch.dp_padding_mode, forward_batch.global_num_tokens_cpu
    if mode is not None and counts is not None and len(counts) > 1:
        kind = "prefill or verification" if forward_batch.is_extend_in_batch else "decode"
        note(f"{mode.name} gather of a {kind}")
