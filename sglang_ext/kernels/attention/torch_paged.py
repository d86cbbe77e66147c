"""The fast path in plain torch: one scaled_dot_product_attention per group of requests.

Few rows (decode, verify): the query heads that share a key head become further query rows of it,
so K and V are read once and never repeated. Many rows (prefill): blocks of rows, so that memory
stays bounded. A soft cap or sinks need the scores themselves and take an explicit fp32 softmax.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_ext.kernels.attention.masks import BandKey
from sglang_ext.kernels.attention.plan import AttentionGroup, AttentionPlan
from sglang_ext.kernels.attention.spec import AttentionSpec

_FOLD_ROWS = 32
_BLOCK_ROWS = 256
_SCORE_ELEMENTS = 1 << 23


def attend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of every planned row; see `api.paged_attention` for shapes."""
    groups = plan.groups(spec.window)
    if len(groups) == 1 and groups[0].covers(q.shape[0]):
        return _attend_group(q, k_buffer, v_buffer, groups[0], spec, sinks)
    out = q.new_zeros(q.shape[0], q.shape[1], v_buffer.shape[-1])
    for group in groups:
        result = _attend_group(q[group.queries], k_buffer, v_buffer, group, spec, sinks)
        if group.scatter is None:
            out[group.queries] = result
        else:
            target, source = group.scatter
            out.index_copy_(0, target, result.index_select(0, source))
    return out


def _attend_group(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    group: AttentionGroup,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [requests * rows, query heads, dim] -> [requests * rows, query heads, value dim]."""
    k = _read(k_buffer, group, q.dtype)
    v = _read(v_buffer, group, q.dtype)
    if spec.logit_cap > 0 or sinks is not None:
        out = _explicit(q, k, v, group, spec, sinks)
    elif group.rows <= _FOLD_ROWS:
        out = _folded(q, k, v, group, spec)
    elif _is_plain_prefill(k, v, group, spec):
        out = _prefill(q, k, v, group, spec)
    else:
        out = _blocked(q, k, v, group, spec)
    return out if spec.v_scale == 1.0 else out * spec.v_scale


def _read(buffer: torch.Tensor, group: AttentionGroup, dtype: torch.dtype) -> torch.Tensor:
    """The group's rows of a pool buffer: [requests, heads, keys, dim]."""
    if isinstance(group.slots, slice):
        return _view(buffer, group.slots, dtype)
    if buffer.dtype.itemsize == 1:
        # index_select does not exist for every 8-bit float type.
        rows = buffer.view(torch.uint8).index_select(0, group.slots).view(buffer.dtype)
    else:
        rows = buffer.index_select(0, group.slots)
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    return rows.view(group.requests, group.keys, *rows.shape[1:]).transpose(1, 2)


def _view(buffer: torch.Tensor, slots: slice, dtype: torch.dtype) -> torch.Tensor:
    """Consecutive rows of the pool in place: [1, heads, keys, dim], one operation."""
    _, heads, dim = buffer.shape
    slot, head, element = buffer.stride()
    first = buffer.storage_offset() + slots.start * slot
    size = (1, heads, slots.stop - slots.start, dim)
    rows = buffer.as_strided(size, (slot, head, slot, element), first)
    return rows if rows.dtype == dtype else rows.to(dtype)


def _fold(q: torch.Tensor, requests: int, kv_heads: int) -> torch.Tensor:
    """[requests * rows, heads, dim] -> [requests, kv heads, rows * share, dim]."""
    count, heads, dim = q.shape
    if count == requests:
        return q.view(requests, kv_heads, heads // kv_heads, dim)
    split = q.view(requests, count // requests, kv_heads, heads // kv_heads, dim)
    return split.transpose(1, 2).reshape(requests, kv_heads, -1, dim)


def _unfold(out: torch.Tensor, rows: int) -> torch.Tensor:
    """[requests, kv heads, rows * share, dim] -> [requests * rows, heads, dim]."""
    requests, kv_heads, queries, dim = out.shape
    if rows == 1:
        return out.reshape(requests, kv_heads * queries, dim)
    split = out.view(requests, kv_heads, rows, -1, dim).transpose(1, 2)
    return split.reshape(requests * rows, -1, dim)


def _folded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AttentionGroup,
    spec: AttentionSpec,
) -> torch.Tensor:
    kv_heads = k.shape[1]
    key = BandKey(spec.causal, spec.window, q.shape[1] // kv_heads, q.dtype, q.device)
    folded = _fold(q, group.requests, kv_heads)
    mask = group.block(key, 0, group.rows).mask
    out = F.scaled_dot_product_attention(
        folded, k, v, attn_mask=mask, scale=spec.scale * spec.k_scale
    )
    return _unfold(out, group.rows)


def _is_plain_prefill(
    k: torch.Tensor, v: torch.Tensor, group: AttentionGroup, spec: AttentionSpec
) -> bool:
    """Whether the kernel's own causal mask is the right one, which skips half of the work."""
    plain = spec.causal and spec.window < 0 and group.tree is None and group.key_pad is None
    plain = plain and group.stride == 1
    return plain and group.rows == group.keys and k.shape[-1] == v.shape[-1]


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AttentionGroup,
    spec: AttentionSpec,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q.view(group.requests, group.rows, *q.shape[1:]).transpose(1, 2),
        k,
        v,
        is_causal=True,
        scale=spec.scale * spec.k_scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


def _blocked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AttentionGroup,
    spec: AttentionSpec,
) -> torch.Tensor:
    grid = q.view(group.requests, group.rows, *q.shape[1:])
    key = BandKey(spec.causal, spec.window, 1, q.dtype, q.device)
    out = grid.new_empty(*grid.shape[:3], v.shape[-1])
    for start in range(0, group.rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, group.rows)
        block = group.block(key, start, stop)
        result = F.scaled_dot_product_attention(
            grid[:, start:stop].transpose(1, 2),
            k[:, :, block.seen],
            v[:, :, block.seen],
            attn_mask=block.mask,
            scale=spec.scale * spec.k_scale,
            enable_gqa=True,
        )
        out[:, start:stop] = result.transpose(1, 2)
    return out.view(q.shape[0], q.shape[1], -1)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AttentionGroup,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    heads, requests = q.shape[1], group.requests
    k, v = k.float(), v.float()
    key = BandKey(spec.causal, spec.window, heads // k.shape[1], torch.float32, q.device)
    grid = q.view(requests, group.rows, heads, -1)
    step = max(1, min(_BLOCK_ROWS, _SCORE_ELEMENTS // (requests * heads * group.keys)))
    out = q.new_empty(requests, group.rows, heads, v.shape[-1])
    for start in range(0, group.rows, step):
        rows = grid[:, start : start + step].float() * (spec.scale * spec.k_scale)
        block = group.block(key, start, start + rows.shape[1])
        folded = _fold(rows.reshape(-1, *rows.shape[2:]), requests, k.shape[1])
        scores = folded @ k[:, :, block.seen].transpose(-1, -2)
        if spec.logit_cap > 0:
            scores = spec.logit_cap * torch.tanh(scores / spec.logit_cap)
        if block.mask is not None:
            scores = scores + block.mask
        weights = _softmax(scores, rows.shape[1], sinks)
        result = _unfold(weights @ v[:, :, block.seen], rows.shape[1])
        out[:, start : start + step] = result.view(requests, -1, heads, v.shape[-1])
    return out.view(q.shape[0], heads, -1)


def _softmax(scores: torch.Tensor, rows: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over keys and, per query head, one extra logit that carries no value.

    scores [requests, kv heads, rows * share, keys], sinks None or [query heads].
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    kv_heads = scores.shape[1]
    sink = sinks.float().view(kv_heads, 1, -1).expand(kv_heads, rows, -1).reshape(kv_heads, -1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))
