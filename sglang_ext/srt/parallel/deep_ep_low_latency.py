"""Low-latency mode of DeepEP's contract: one copy per (token, expert) into fixed slots.

Two receive buffers are used in turn, so the rows of a dispatch live until the second dispatch
after it. DeepEP overwrites them silently; here the handle of overwritten rows is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_ext.core.dispatch import (
    Copies,
    DispatchError,
    ExpertShards,
    low_latency_copies,
    low_latency_slots,
    sum_copies,
)
from sglang_ext.core.quant import FP8_BLOCK
from sglang_ext.core.row_quant import pack_ue8m0, quantise_rows
from sglang_ext.srt.parallel import told_counts
from sglang_ext.srt.parallel.deep_ep_types import LowLatencyHandle, check_rows
from sglang_ext.srt.parallel.row_exchange import RowExchange, Traffic
from sglang_ext.srt.parallel.told_counts import LIMIT, told

_LIVE = 2


def buffer_bytes(max_tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Bytes of the two receive buffers and the combine buffer, 16-bit rows with float scales."""
    slots = experts // ranks * max_tokens * ranks
    return slots * (3 * 2 * hidden + _LIVE * 4 * -(-hidden // FP8_BLOCK))


# Buffers outlive the call that makes them, and the next may write outside inference mode.
_writable_later = torch.inference_mode(mode=False)


class LowLatencyExchange:
    """Slots of one group. Sizes may change between dispatches; a buffer is then made anew."""

    def __init__(self, exchange: RowExchange) -> None:
        self.exchange = exchange
        self.generation = 0
        self._received: list[list[Tensor]] = [[] for _ in range(_LIVE)]
        self._outputs: Tensor | None = None

    def dispatch(
        self,
        traffic: Traffic,
        x: Tensor,
        topk_idx: Tensor,
        max_tokens: int,
        shards: ExpertShards,
        *,
        fp8: bool,
        power_of_two: bool,
        packed: bool,
    ) -> tuple[list[Tensor], Tensor, LowLatencyHandle, Callable[[], None]]:
        """Returns buffers ([E/R, M*R, H] and scales), counts [E/R] int32, handle, arrival call."""
        arrived, copies = self._agree(x, topk_idx, max_tokens, shards)
        columns = [x]
        if fp8:
            codes, scale = quantise_rows(x, power_of_two=power_of_two)
            columns = [codes, pack_ue8m0(scale) if packed else scale]
        slots = low_latency_slots(arrived, max_tokens * shards.ranks)
        received = arrived.sum(dim=1).tolist()
        shape = (shards.per_rank, max_tokens * shards.ranks, x.shape[1])
        buffers = self._buffers(columns, shape)
        self.generation += 1
        handle = LowLatencyHandle(copies, received, slots, topk_idx, shape, self.generation)
        sent = [c[copies.rows] for c in columns]
        finish = self.exchange.rows(sent, copies.per_rank, received, traffic)

        def arrive() -> None:
            if not handle.arrived:
                self._check_newest(handle)
                for buffer, rows in zip(buffers, finish(), strict=True):
                    _scatter(buffer, slots, rows)
                handle.arrived = True

        return buffers, arrived.sum(dim=0).int(), handle, arrive

    def combine(
        self,
        traffic: Traffic,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
    ) -> Callable[[], Tensor]:
        """x [E/R, M*R, H] -> a call that gives [T, H] in x's dtype, the weighted sum."""
        self._check_live(handle)
        if tuple(x.shape) != handle.shape:
            raise DispatchError(
                "x",
                expected=f"[experts, slots, hidden] = {list(handle.shape)}",
                found=list(x.shape),
                remedy="Return the buffer of this dispatch with every slot in its place.",
            )
        if not torch.equal(topk_idx, handle.topk_idx):
            raise DispatchError(
                "topk_idx",
                expected="the ids of the dispatch this handle came from",
                found=f"other ids, {list(topk_idx.shape)}",
                remedy="Keep topk_idx beside its handle.",
            )
        rows = x.flatten(0, 1)[handle.slots]
        finish = self.exchange.rows([rows], handle.received, handle.copies.per_rank, traffic)
        tokens = topk_idx.shape[0]

        def collect() -> Tensor:
            return sum_copies(finish()[0], handle.copies, tokens, topk_weights).to(x.dtype)

        return collect

    @_writable_later
    def outputs(self, handle: LowLatencyHandle, like: torch.device) -> Tensor:
        """[E/R, M*R, H] bfloat16 that expert outputs may be written into."""
        self._check_live(handle)
        kept = self._outputs
        if kept is None or tuple(kept.shape) != handle.shape:
            self._outputs = kept = torch.empty(handle.shape, dtype=torch.bfloat16, device=like)
        return kept

    def is_outputs(self, x: Tensor) -> bool:
        return self._outputs is not None and x.data_ptr() == self._outputs.data_ptr()

    def forget(self) -> None:
        """Drops the buffers; every handle becomes stale."""
        self.generation += _LIVE
        self._received = [[] for _ in range(_LIVE)]
        self._outputs = None

    def _agree(
        self, x: Tensor, topk_idx: Tensor, limit: int, shards: ExpertShards
    ) -> tuple[Tensor, Copies]:
        """Counts of arriving copies [R, E/R]; all ranks raise together when one cannot send."""
        with told(self.exchange, shards.per_rank, topk_idx.device):
            tokens = x.shape[0]
            if tokens > limit:
                raise DispatchError(
                    LIMIT,
                    expected=f"at least the {tokens} tokens of this rank",
                    found=limit,
                    remedy="Raise SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, send fewer "
                    "tokens (running requests times verified rows each) or use normal mode.",
                )
            check_rows("topk_idx", topk_idx.shape[0], tokens)
            copies = low_latency_copies(topk_idx, shards, limit)
        sent = copies.per_expert.view(shards.ranks, -1)
        return told_counts.counts(self.exchange, sent), copies

    @_writable_later
    def _buffers(self, columns: list[Tensor], shape: tuple[int, int, int]) -> list[Tensor]:
        """This turn's buffers: rows [E/R, M*R, H] and, column-major, scales [E/R, M*R, w]."""
        experts, slots, _ = shape
        kept = self._received[self.generation % _LIVE]
        wanted = [((experts, slots, c.shape[1]), c.dtype) for c in columns]
        if [(tuple(b.shape), b.dtype) for b in kept] == wanted:
            return kept
        device = columns[0].device
        made = [torch.empty(wanted[0][0], dtype=columns[0].dtype, device=device)]
        for column in columns[1:]:
            scales = torch.empty(
                (experts, column.shape[1], slots), dtype=column.dtype, device=device
            )
            made.append(scales.transpose(1, 2))
        self._received[self.generation % _LIVE] = made
        return made

    def _check_live(self, handle: LowLatencyHandle) -> None:
        self._check_newest(handle)
        if not handle.arrived:
            raise DispatchError(
                "handle",
                expected="a dispatch whose rows have arrived",
                found="a receive hook that was not called",
                remedy="Call the hook before the experts run.",
            )

    def _check_newest(self, handle: LowLatencyHandle) -> None:
        if handle.generation <= self.generation - _LIVE:
            raise DispatchError(
                "handle",
                expected=f"one of the last {_LIVE} low-latency dispatches",
                found=f"dispatch {handle.generation} of {self.generation}",
                remedy="Combine before the second dispatch after it; its rows are overwritten.",
            )


def _scatter(buffer: Tensor, slots: Tensor, rows: Tensor) -> None:
    """buffer[e, s] = row, slot e * S + s; a buffer of 8-bit floats is written as bytes."""
    expert = torch.div(slots, buffer.shape[1], rounding_mode="floor")
    within = slots - expert * buffer.shape[1]
    if buffer.element_size() == 1:
        buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
    buffer[expert, within] = rows
