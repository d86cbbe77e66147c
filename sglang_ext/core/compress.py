"""Compression of DeepSeek-V4: which tokens pool into which entry, and who may see it.

A compressed layer keeps, beside the last tokens, one entry per block of `ratio` tokens:

    HCA  ratio 128   entry i pools the 128 tokens of block i
    CSA  ratio 4     entry i pools 8 rows: series b of block i's 4 tokens and series a of the 4
                     before them; block 0 has none before it

Per channel the pooled value is softmax(gate) . kv over those rows; then RMSNorm, then rotation at
the block's first position. A query at position p sees entry i iff i < (p + 1) // ratio: a block
is visible from its own last token on.

A token's row is kv beside gate, the learned position bias of its place in the block already added
to the gate, so that a row is final when it is written. CSA rows hold series a before series b in
both halves.

Source: DeepSeek-V4 report, sections on CSA and HCA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.core.rope import rotate_trailing_pairs

CSA, HCA = 4, 128


def series_of(ratio: int) -> int:
    """How many series of channels a row holds: CSA blocks overlap, HCA blocks do not."""
    return 2 if ratio == CSA else 1


def raw_width(ratio: int, dim: int) -> int:
    """Channels of a token's row: kv and gate, `dim` wide each per series."""
    return 2 * series_of(ratio) * dim


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """How many leading entries a query at each of `positions` sees; same shape, int64."""
    return (positions + 1) // ratio


def closes_block(positions: Tensor, ratio: int) -> Tensor:
    """Which positions are the last of their block; same shape, bool."""
    return (positions + 1) % ratio == 0


def block_positions(last: Tensor, ratio: int) -> Tensor:
    """[blocks] last positions -> [blocks, rows] positions that pool, in order, -1 where none.

    CSA lists the block before first; of it series a counts, of the block itself series b.
    """
    rows = series_of(ratio) * ratio
    positions = last.unsqueeze(1) - torch.arange(rows - 1, -1, -1, device=last.device)
    return positions.clamp(min=-1)


def raw_rows(kv: Tensor, gate: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """Rows to store for new tokens.

    Args:
        kv, gate: [tokens, series * dim], projections of the tokens.
        bias: [ratio, series * dim], one row per place in a block.
        positions: [tokens] int64.

    Returns:
        [tokens, 2 * series * dim] float32.
    """
    biased = gate.float() + bias.float()[positions % bias.shape[0]]
    return torch.cat((kv.float(), biased), dim=-1)


def pool(rows: Tensor, present: Tensor, ratio: int) -> Tensor:
    """Softmax pooling of gathered rows.

    Args:
        rows: [blocks, series * ratio, 2 * series * dim], in the order of `block_positions`; what
            is not present may hold anything.
        present: [blocks, series * ratio] bool.

    Returns:
        [blocks, dim] float32, before norm and rotation.
    """
    kv, gate = rows.float().chunk(2, dim=-1)
    if series_of(ratio) == 2:
        half = kv.shape[-1] // 2
        kv = torch.cat((kv[:, :ratio, :half], kv[:, ratio:, half:]), dim=1)
        gate = torch.cat((gate[:, :ratio, :half], gate[:, ratio:, half:]), dim=1)
    absent = ~present.unsqueeze(-1)
    weights = torch.softmax(gate.masked_fill(absent, float("-inf")), dim=1)
    return (kv.masked_fill(absent, 0.0) * weights).sum(dim=1)


def finish(pooled: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm, then rotation at the block's first position.

    pooled [blocks, dim], weight [dim], cos and sin [blocks, rope / 2] -> [blocks, dim] float32.
    """
    scale = torch.rsqrt(pooled.square().mean(dim=-1, keepdim=True) + eps)
    normed = pooled * scale * weight.float()
    return rotate_trailing_pairs(normed.unsqueeze(1), cos, sin).squeeze(1)
