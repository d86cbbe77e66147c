"""Causal depthwise convolution over ragged sequences with a carried state.

The state of a sequence is its last `width - 1` inputs, oldest first, in the first columns of its
slot. All sums are in float32 and results have the dtype of the input.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

PAD_SLOT = -1
_SILU_NAMES = ("silu", "swish")


def _convolve(
    windows: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """Sum over taps of window * weight; windows [..., dim] from the oldest, weight [dim, width]."""
    taps = weight.float().unbind(1)
    out = windows[0].float() * taps[0]
    for window, tap in zip(windows[1:], taps[1:], strict=True):
        out += window.float() * tap
    if bias is not None:
        out += bias.float()
    return F.silu(out) if silu else out


def causal_conv1d_fn_cpu(
    mixed_qkv_transposed: torch.Tensor,
    conv_weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    cache_indices: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int] | None = None,
) -> torch.Tensor:
    """Convolves packed sequences and leaves each one's last inputs in its slot.

    Args:
        mixed_qkv_transposed: [dim, tokens].
        conv_weights: [dim, width].
        bias: [dim].
        conv_states: [slots, dim, >= width - 1], written in place.
        has_initial_state: [batch] bool; a sequence without starts from zeros.
        cache_indices: [batch] int, slot of each sequence (its own number by default); -1 neither
            reads nor writes a state.
        query_start_loc: [batch + 1] int, first token of each sequence and the end.
        seq_lens_cpu: part of the signature; `query_start_loc` says the same.

    Returns:
        [dim, tokens]; columns behind the last sequence are zero.
    """
    x = mixed_qkv_transposed.t()
    carried = conv_weights.shape[1] - 1
    starts = query_start_loc.long()
    lengths = starts.diff()
    batch, tokens = lengths.numel(), int(starts[-1])
    slots = _slots(cache_indices, batch, x.device)
    sequence = torch.repeat_interleave(torch.arange(batch, device=x.device), lengths)
    # The sequences laid out anew, each behind the columns that it carries over.
    place = torch.arange(tokens, device=x.device) + (sequence + 1) * carried
    extended = x.new_zeros(tokens + batch * carried, x.shape[1])
    extended[place] = x[:tokens]
    edge = (starts[:-1] + torch.arange(batch, device=x.device) * carried).unsqueeze(1)
    edge = edge + torch.arange(carried, device=x.device)
    starts_from_state = slots != PAD_SLOT
    if has_initial_state is not None:
        starts_from_state = starts_from_state & has_initial_state.bool()
    previous = conv_states[slots.clamp(min=0), :, :carried].transpose(1, 2).to(x.dtype)
    extended[edge] = torch.where(starts_from_state.view(-1, 1, 1), previous, 0)

    windows = [extended[place - carried + tap] for tap in range(carried + 1)]
    out = torch.zeros_like(x)
    out[:tokens] = _convolve(windows, conv_weights, bias, activation in _SILU_NAMES).to(x.dtype)
    last = extended[edge + lengths.unsqueeze(1)]
    _store(conv_states, slots, last, carried)
    return out.t()


def causal_conv1d_update_cpu(
    mixed_qkv: torch.Tensor,
    conv_states: torch.Tensor,
    conv_weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolves the next token, or the next few, of every sequence.

    Args:
        mixed_qkv: [batch, dim] or [batch, dim, tokens].
        conv_states: [slots, dim, >= width - 1], written in place.
        conv_weights: [dim, width].
        bias: [dim].
        conv_state_indices: [batch] int; -1 marks a padded row, returned as it came.

    Returns:
        The shape of `mixed_qkv`.
    """
    x = mixed_qkv if mixed_qkv.dim() == 3 else mixed_qkv.unsqueeze(2)
    carried = conv_weights.shape[1] - 1
    slots = _slots(conv_state_indices, x.shape[0], x.device)
    previous = conv_states[slots.clamp(min=0), :, :carried].to(x.dtype)
    extended = torch.cat([previous, x], dim=2).transpose(1, 2)
    windows = [extended[:, tap : tap + x.shape[2]] for tap in range(carried + 1)]
    out = _convolve(windows, conv_weights, bias, activation in _SILU_NAMES).to(x.dtype)
    _store(conv_states, slots, extended[:, x.shape[2] :], carried)
    padded = (slots == PAD_SLOT).view(-1, 1, 1)
    return torch.where(padded, x, out.transpose(1, 2)).view(mixed_qkv.shape)


def _slots(indices: torch.Tensor | None, batch: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch, device=device) if indices is None else indices.long()


def _store(
    conv_states: torch.Tensor, slots: torch.Tensor, last: torch.Tensor, carried: int
) -> None:
    """Writes last [batch, carried, dim] to the slots that are not padding."""
    kept = slots != PAD_SLOT
    conv_states[slots[kept], :, :carried] = last[kept].transpose(1, 2).to(conv_states.dtype)
