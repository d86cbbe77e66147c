"""Which parts of a layout were in use: each is logged the first time a rank meets it."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)
_seen: set[str] = set()


def note(event: str) -> None:
    """Log `event` once per process; operators and tests read it to know what a run covered."""
    if event not in _seen:
        _seen.add(event)
        logger.info("layout: first %s", event)
