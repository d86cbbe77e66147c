"""ForwardBatch -> groups of query rows that are computed together, for DeepSeek-V3.2.

SGLang describes the rows of a forward differently per mode:
    EXTEND, MIXED    extend_seq_lens rows behind extend_prefix_lens cached tokens
    DECODE           one row, seq_lens includes it
    TARGET_VERIFY    spec_info says how many rows, seq_lens EXCLUDES them
A plan knows only, per request: its slots, its rows, and the position of the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_ext.srt.attention.portable_plan import verify_rows

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_ext.srt.parallel.context import LocalRows

# A request with at most this many rows shares a group with others like it.
SHORT_ROWS = 16
# Tokens that the requests of one group have together, padding included; one alone may have more.
GROUP_TOKENS = 1 << 16


@dataclass(frozen=True)
class Span:
    """Rows of one request in a forward.

    request: row of req_to_token. row: its first query row. count: how many. first: position of
    the first one. stride: positions from one row to the next.
    """

    request: int
    row: int
    count: int
    first: int
    stride: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that the last row sees."""
        return self.first + (self.count - 1) * self.stride + 1


@dataclass(frozen=True)
class RowGroup:
    """Requests that are computed in one call, padded to the same sizes.

    rows: [requests, width] int64, query row; 0 where padded.
    visible: [requests, width] int64, tokens a row sees, itself included; 0 where padded.
    slots: [requests, tokens] int64, pool rows; slot 0 where padded.
    first: position of the first row where the group is one request whose rows lie side by side.
    """

    rows: Tensor
    visible: Tensor
    slots: Tensor
    first: int | None

    @property
    def tokens(self) -> int:
        return self.slots.shape[1]


def spans_of(batch: ForwardBatch) -> list[Span]:
    """The real requests of a forward, in row order; padding (request row 0) is left out.

    Raises:
        ValueError: a verify batch whose spec_info does not say how many rows it has.
    """
    lengths = batch.seq_lens.tolist()
    if batch.forward_mode.is_target_verify():
        counts, firsts = verify_rows(batch.spec_info, len(lengths)), lengths
    elif batch.forward_mode.is_decode():
        counts, firsts = [1] * len(lengths), [n - 1 for n in lengths]
    else:
        known = batch.extend_seq_lens_cpu
        counts = list(known) if known is not None else batch.extend_seq_lens.tolist()
        firsts = [n - c for n, c in zip(lengths, counts, strict=False)]
    spans, row = [], 0
    requests = batch.req_pool_indices.tolist()
    for request, count, first in zip(requests, counts, firsts, strict=False):
        if request and count:
            spans.append(Span(request, row, count, first))
        row += count
    return spans


def split_spans(batch: ForwardBatch, local: LocalRows) -> list[Span]:
    """The part of a prefill's rows that context parallelism leaves to this rank."""
    requests = batch.req_pool_indices.tolist()
    spans, row, stride = [], 0, local.stride
    for run, keys, count in zip(local.requests, local.keys, local.rows, strict=True):
        first = keys - 1 - (count - 1) * stride
        spans.append(Span(requests[run], row, count, first, stride))
        row += count
    return spans


def chain_spans(batch: ForwardBatch, step: int) -> list[Span]:
    """Row `step` of a chain that every request drafts behind its `seq_lens` cached tokens."""
    rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    spans = (Span(request, row, 1, prefix + step) for row, (request, prefix) in enumerate(rows))
    return [span for span in spans if span.request]


def group(spans: list[Span], req_to_token: Tensor) -> list[RowGroup]:
    """Requests with many rows alone, the others together by similar length.

    req_to_token: [request rows, positions] int32.
    """
    groups = [_pad([span], req_to_token) for span in spans if span.count > SHORT_ROWS]
    together: list[Span] = []
    short = (span for span in spans if span.count <= SHORT_ROWS)
    for span in sorted(short, key=lambda s: s.tokens):
        # Sorted, so the span at hand sets the padded length.
        if together and (len(together) + 1) * span.tokens > GROUP_TOKENS:
            groups.append(_pad(together, req_to_token))
            together = []
        together.append(span)
    if together:
        groups.append(_pad(together, req_to_token))
    return groups


def _pad(spans: list[Span], req_to_token: Tensor) -> RowGroup:
    device = req_to_token.device
    counts = torch.tensor([s.count for s in spans], device=device)[:, None]
    starts = torch.tensor([s.row for s in spans], device=device)[:, None]
    firsts = torch.tensor([s.first for s in spans], device=device)[:, None]
    strides = torch.tensor([s.stride for s in spans], device=device)[:, None]
    seen = torch.tensor([s.tokens for s in spans], device=device)[:, None]
    step = torch.arange(max(s.count for s in spans), device=device)
    real = step < counts
    requests = torch.tensor([s.request for s in spans], device=device)
    tokens = max(s.tokens for s in spans)
    slots = req_to_token[requests, :tokens].long()
    slots = slots.masked_fill(torch.arange(tokens, device=device) >= seen, 0)
    alone = len(spans) == 1 and spans[0].stride == 1
    return RowGroup(
        rows=torch.where(real, starts + step, 0),
        visible=torch.where(real, firsts + step * strides + 1, 0),
        slots=slots,
        first=spans[0].first if alone else None,
    )
