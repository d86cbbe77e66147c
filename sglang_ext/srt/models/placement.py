"""Where one tensor of a checkpoint goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """parameter, then the shard and the expert that its loader is told."""

    parameter: str
    shard: str | int | None = None
    expert: int | None = None
