"""What `deep_ep.Buffer` takes and returns beside tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.dispatch import Copies, DispatchError


@dataclass(frozen=True)
class Config:
    """Tuning of deep_ep's kernels; torch.distributed has nothing to tune, so it is unused.

    Raises:
        DispatchError: an odd or non-positive number of SMs.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        check_sms(self.num_sms)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of registered memory for one node: 0, received rows are allocated per call."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of registered memory between nodes: 0, received rows are allocated per call."""
        return 0


def check_sms(num_sms: int) -> None:
    if num_sms < 2 or num_sms % 2:
        raise DispatchError(
            "num_sms", expected="a positive even number", found=num_sms, remedy="Use 20."
        )


def check_rows(field: str, found: int, expected: int) -> None:
    if found != expected:
        raise DispatchError(
            field,
            expected=f"{expected} rows",
            found=found,
            remedy="Arguments of one exchange describe the same tokens.",
        )


class EventOverlap:
    """A point in the device's work that a stream may wait for; without streams, the past."""

    def __init__(self, event: torch.Event | None = None, extra_tensors: Any = None) -> None:
        self.event = event
        # Kept alive until the event is dropped.
        self.extra_tensors = extra_tensors

    @classmethod
    def now(cls) -> EventOverlap:
        """After all work issued on the current stream."""
        if not torch.accelerator.is_available():
            return cls()
        event = torch.Event(device=torch.accelerator.current_accelerator())
        event.record()
        return cls(event)

    def current_stream_wait(self) -> None:
        if self.event is not None:
            self.event.wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


@dataclass(frozen=True)
class NormalHandle:
    """How rows of a normal dispatch travelled, to combine them or to dispatch others alike.

    copies: as sent; received: [R] rows from each rank; tokens: T
    """

    copies: Copies
    received: list[int]
    tokens: int


@dataclass
class LowLatencyHandle:
    """How copies of a low-latency dispatch travelled.

    copies: as sent; received: [R] copies from each rank; slots: [N] slot of each
    topk_idx: [T, K]; shape: (E/R, M * R, H) of the receive buffer
    generation: number of the dispatch; arrived: whether the rows are in the buffer
    """

    copies: Copies
    received: list[int]
    slots: Tensor
    topk_idx: Tensor
    shape: tuple[int, int, int]
    generation: int
    arrived: bool = field(default=False)
