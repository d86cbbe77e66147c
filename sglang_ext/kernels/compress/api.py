"""Checked entry to the compressor."""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core.compress import raw_width, series_of
from sglang_ext.kernels.choice import runs_triton
from sglang_ext.kernels.compress.torch_compress import compress_blocks_torch


def compress_blocks(
    raw: Tensor,
    members: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    ratio: int,
    implementation: str = "auto",
) -> Tensor:
    """entry[b] = R(first position) RMSNorm(sum over members of softmax(gate) * kv).

    With ratio 4 blocks overlap: members are the previous block's tokens, of which series a
    counts, then the block's own, of which series b counts. See `core.compress`.

    Args:
        raw: [pool rows, 2 * series * dim] float32, kv beside gate, bias added.
        members: [blocks, series * ratio] int64, pool rows, -1 where there is no token; a block's
            own tokens are always there. blocks may be 0.
        weight: [dim], of the norm.
        eps: of the norm.
        cos, sin: [blocks, rope / 2], at the blocks' first positions.
        ratio: 4 or 128.
        implementation: auto, torch or triton.

    Returns:
        [blocks, dim] float32.

    Raises:
        ValueError: shapes that contradict each other, with expected and found; an
            implementation that cannot run.
    """
    dim, blocks, series = weight.shape[0], members.shape[0], series_of(ratio)
    _expect("raw", raw, (raw.shape[0], raw_width(ratio, dim)))
    _expect("members", members, (blocks, series * ratio))
    _expect("cos", cos, (blocks, cos.shape[1]))
    _expect("sin", sin, tuple(cos.shape))
    if not _triton(implementation, raw, dim):
        return compress_blocks_torch(raw, members, weight, eps, cos, sin, ratio)
    from sglang_ext.kernels.compress.triton import compress_blocks_triton

    raw, members, weight = raw.contiguous(), members.contiguous(), weight.contiguous()
    return compress_blocks_triton(
        raw, members, weight, eps, cos.contiguous(), sin.contiguous(), ratio
    )


def _triton(implementation: str, raw: Tensor, dim: int) -> bool:
    """Pairs of an odd dim do not line up with the kernel's; no model has one."""
    if dim % 2 == 0:
        return runs_triton("compress_blocks", implementation, raw.device)
    if implementation == "triton":
        raise ValueError(
            f"compress_blocks: weight: expected an even dim for 'triton', found {dim}; "
            "use 'auto' or 'torch'"
        )
    return False


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"compress_blocks: {name}: expected {list(shape)}, found {list(tensor.shape)}"
        )
