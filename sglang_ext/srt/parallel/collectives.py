"""Collectives over parts of unequal length, for a group without an NCCL communicator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _parts(group: Any, rows: int, sizes: list[int] | None) -> list[int]:
    if sizes is not None:
        if len(sizes) != group.world_size:
            raise ValueError(
                f"sizes: expected one per rank of {group.world_size}, found {list(sizes)}"
            )
        return list(sizes)
    return [rows] * group.world_size


def reduce_scatter_parts(
    group: Any, rows: Tensor, out: Tensor | None, sizes: list[int] | None
) -> Tensor:
    """rows [sum(sizes), ...], summed over ranks -> this rank's part [sizes[rank], ...].

    Raises:
        ValueError: rows that are not the sum of the parts.
    """
    parts = _parts(group, rows.shape[0] // group.world_size, sizes)
    if sum(parts) != rows.shape[0]:
        raise ValueError(f"rows: expected {sum(parts)} (parts {parts}), found {rows.shape[0]}")
    total = rows.clone()
    dist.all_reduce(total, group=group.device_group)
    first = sum(parts[: group.rank_in_group])
    part = total[first : first + parts[group.rank_in_group]]
    return part.clone() if out is None else out.copy_(part)


def all_gather_parts(
    group: Any, rows: Tensor | list[Tensor], sizes: list[int] | None, out: Tensor | None
) -> Tensor | list[Tensor]:
    """Each rank's [sizes[rank], ...] -> [sum(sizes), ...] in rank order; a list piece by piece."""
    if not isinstance(rows, Tensor):
        return [_gather(group, piece, sizes) for piece in rows]
    gathered = _gather(group, rows, sizes)
    return gathered if out is None else out.copy_(gathered)


def _gather(group: Any, rows: Tensor, sizes: list[int] | None) -> Tensor:
    parts = _parts(group, rows.shape[0], sizes)
    # gloo gathers equal parts only.
    padded = rows.new_zeros(max(parts), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    pieces = [torch.empty_like(padded) for _ in parts]
    dist.all_gather(pieces, padded, group=group.device_group)
    return torch.cat([piece[:n] for piece, n in zip(pieces, parts, strict=True)])
